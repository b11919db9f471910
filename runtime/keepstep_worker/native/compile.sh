#!/bin/sh
# Compiles stream.c to the shared library TARGET: compile.sh TARGET
set -eu
made="$1.$$"
"${CC:-gcc}" -O2 -Wall -Wextra -Werror -shared -fPIC -ffreestanding -fno-tree-loop-distribute-patterns -nostdlib \
    -o "$made" "$(dirname "$0")/stream.c"
mv "$made" "$1"
