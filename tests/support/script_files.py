"""Checkpoints as TensorFlow and Keras wrote them, laid out in folders of a test's own."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "unit" / "checkpoint" / "files" / "golden"


def lay(source: str, folder: Path, *, rename: tuple[str, str] = ("", ""), at_s: int = 1_000) -> list[Path]:
    """Copy a folder of golden files; each is a second younger than the one before it.

    Args:
        source: a folder of `golden`, or a file in one.
        folder: made where it is not there.
        rename: a part of each name, and what stands there instead.
        at_s: when the first of them was written, seconds since 1970.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = GOLDEN / source
    laid = []
    for number, path in enumerate([found] if found.is_file() else sorted(found.iterdir())):
        target = folder / path.name.replace(*rename)
        shutil.copyfile(path, target)
        os.utime(target, (at_s + number, at_s + number))
        laid.append(target)
    return laid


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its place."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def lay_again(root: Path, name: str, other: str, at_s: int) -> None:
    """Lay a set's files once more under another name, which the `checkpoint` file does not say."""
    for path in list(root.glob(f"{name}.*")):
        copied = Path(shutil.copyfile(path, root / path.name.replace(name, other)))
        os.utime(copied, (at_s, at_s))


def tear(path: Path) -> None:
    """Cut a file in the middle, as a writer that died leaves it; the time it was written at stays."""
    status = path.stat()
    os.truncate(path, status.st_size // 2)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
