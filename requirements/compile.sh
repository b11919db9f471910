#!/usr/bin/env bash
# Pin every dependency by version and digest, for Python 3.11 on Linux x86_64. Needs uv; run by `make requirements`.
set -euo pipefail
cd "$(dirname "$0")"
uv=${UV:-uv}

compile() {
  "$uv" pip compile --quiet --no-config --generate-hashes --no-emit-index-url --no-emit-find-links --no-header --no-annotate \
    --python-version 3.11 --python-platform x86_64-manylinux_2_28 "$@" >/dev/null
}

compile agent.in -o agent.txt
compile build.in -o build.txt
compile -c agent.txt -c build.txt dev.in -o dev.txt
compile tensorflow.in -o tensorflow.txt
for release in 2.13 2.16 2.19; do compile "tensorflow-$release.in" -o "tensorflow-$release.txt"; done
compile --no-deps tf-keras.in -o tf-keras.txt
compile torch.in -o torch.txt
compile toolkit-build.in -o toolkit-build.txt
compile toolkit.in -o toolkit.txt
compile --no-deps toolkit-tensorflow.in -o toolkit-tensorflow.txt
compile localstack.in -o localstack.txt
compile sdk.in -o sdk.txt
compile sdk2.in -o sdk2.txt
compile mpi4py.in -o mpi4py.txt
compile horovod-build.in -o horovod-build.txt
compile -c horovod-build.txt horovod.in -o horovod.txt
