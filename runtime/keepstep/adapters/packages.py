"""Installs what a job asks for into the user's interpreter, with its own pip; for a process of its own."""

from __future__ import annotations

import os
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from keepstep import kernel
from keepstep.errors import ConfigError

_TOLD_LINES = 3
_WORDS_OF_PIP = 400


def install(
    python: str, words: Sequence[str], folder: Path, environment: Mapping[str, str], say: Callable[[str], None]
) -> None:
    """Run `pip install WORDS` in a folder, as a child that ends with this process.

    Args:
        say: takes each line that pip prints.

    Raises:
        ConfigError: pip is not there, or does not succeed; what it says is wrong is named.
    """
    own = os.getpid()
    command = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", *words]
    process = subprocess.Popen(
        command, cwd=folder, env=dict(environment), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace", preexec_fn=lambda: kernel.die_with_parent(own),
    )  # fmt: skip
    wrong: deque[str] = deque(maxlen=_TOLD_LINES)
    last = ""
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            last = line.strip() or last
            say(line.rstrip())
            if last.startswith("ERROR:"):
                wrong.append(last)
    code = process.wait()
    if code:
        said = " ".join(wrong or (last,))[:_WORDS_OF_PIP]
        raise ConfigError(f"pip install {' '.join(words)} ended with {code}: {said}", "packages that can be installed")
