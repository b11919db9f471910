"""A folder of code as one archive, the same bytes for the same code."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from keepstep.errors import ConfigError

BYTES_MAX = 512 << 20
LEFT_OUT = frozenset(
    {".git", ".hg", ".svn", "__pycache__", ".venv", "venv", ".mypy_cache", ".pytest_cache", ".ruff_cache"}
)
"""Folders that are no code."""


def pack(folder: Path, more: Mapping[str, bytes] | None = None) -> bytes:
    """Pack all plain files below a folder, and `more` beside them, into a tar.gz.

    Raises:
        ConfigError: it is no folder, or holds far more than code.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder", "the folder that holds the script", key="--source")
    total, made = 0, io.BytesIO()
    with (
        gzip.GzipFile(fileobj=made, mode="wb", mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w") as tar,
    ):
        for path in sorted(_files(folder)):
            total += path.stat().st_size
            if total > BYTES_MAX:
                hint = "give data as a channel: --input NAME=s3://..."
                found = f"{folder} holds more than {BYTES_MAX >> 20} MB"
                raise ConfigError(found, "code alone", key="--source", hint=hint)
            _add(tar, str(path.relative_to(folder)), _read(path), os.access(path, os.X_OK))
        for name, content in sorted((more or {}).items()):
            _add(tar, name, content, False)
    return made.getvalue()


def _files(folder: Path) -> Iterator[Path]:
    seen: set[str] = set()
    for where, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        if os.path.realpath(where) in seen:  # a link led back
            folders.clear()
            continue
        seen.add(os.path.realpath(where))
        yield from (path for name in names if (path := Path(where) / name).is_file())


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", "files that can be read", key="--source") from None


def _add(tar: tarfile.TarFile, name: str, content: bytes, is_program: bool) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(content), 0o755 if is_program else 0o644
    tar.addfile(member, io.BytesIO(content))
