"""Unpacks an archive of somebody's code into a folder, and nowhere else."""

from __future__ import annotations

import os
import shutil
import tarfile
import zlib
from lzma import LZMAError
from pathlib import Path, PurePosixPath

from keepstep.errors import ConfigError

BYTES_MAX = 4 << 30
"""What an archive of code may come to once it is unpacked."""
MEMBERS_MAX = 200_000
NAME_BYTES_MAX = 1024
_TRAILING_BYTES_MAX = 1 << 20
_HEADROOM_BYTES = 64 << 20
"""What is left on the disk for everybody else."""
_WANTED = "a tar archive of code, of plain files, folders, and links among them"


class UnfitArchive(ConfigError):
    """An archive that is not to be unpacked; nothing of it is left where it would have been harmful."""

    def __init__(self, found: str, wanted: str = _WANTED) -> None:
        super().__init__(found, wanted)


def unpack(archive: Path, into: Path, bytes_max: int = BYTES_MAX, members_max: int = MEMBERS_MAX) -> int:
    """Unpack a tar archive, compressed or not, into a folder that is there; return the bytes of its files.

    Owners, times and special bits are not taken over. A file that is there already is replaced.

    Raises:
        UnfitArchive: it is none, is cut off, is larger than the limits or the disk, or has a member that is neither
            file nor folder nor link, or that leads out of the folder.
        OSError: the folder can not be written.
    """
    root = Path(os.path.realpath(into))
    room = min(bytes_max, shutil.disk_usage(root).free - _HEADROOM_BYTES)
    used = 0
    try:
        with tarfile.open(archive, "r:*") as tar:
            for number, member in enumerate(tar, 1):
                if number > members_max:
                    raise UnfitArchive(f"it has more than {members_max} members", f"at most {members_max}")
                used += member.size if member.isfile() else 0
                if used > room:
                    raise UnfitArchive(f"its files come to more than {room} bytes", f"at most {room} bytes")
                _unpack_member(tar, member, root)
            _read_to_the_end(tar)
    except (tarfile.TarError, EOFError, zlib.error, LZMAError, ValueError, RecursionError, OverflowError) as error:
        if isinstance(error, UnfitArchive):
            raise
        raise UnfitArchive(f"it can not be read: {error}") from None
    except OSError as error:
        if error.errno is not None:
            raise
        raise UnfitArchive(f"it can not be read: {error}") from None  # so gzip and bzip2 speak of their checksums
    return used


def _read_to_the_end(tar: tarfile.TarFile) -> None:
    """An archive has a mark at its end, and what compresses keeps its checksum behind that."""
    assert tar.fileobj is not None
    if tar.fileobj.tell() <= tar.offset:
        raise UnfitArchive("it is cut off: the mark at its end is missing")
    if len(tar.fileobj.read(_TRAILING_BYTES_MAX + 1)) > _TRAILING_BYTES_MAX:
        raise UnfitArchive(f"more than {_TRAILING_BYTES_MAX} bytes stand behind its end")


def _unpack_member(tar: tarfile.TarFile, member: tarfile.TarInfo, root: Path) -> None:
    path = _place(member, root)
    if member.isdir():
        path.mkdir(mode=0o755, parents=True, exist_ok=True)
        return
    if path == root:
        raise UnfitArchive(f"its member {member.name!r} stands for the folder itself, and is none")
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    if path.is_symlink() or path.is_file():
        path.unlink()
    if member.issym():
        _demand_inside(member, path.parent / member.linkname, root)
        path.symlink_to(member.linkname)
        return
    if member.islnk():
        target = root / member.linkname
        _demand_inside(member, target, root)
        if not target.is_file():
            raise UnfitArchive(f"its member {member.name!r} is a link to {member.linkname!r}, which is not there")
        os.link(os.path.realpath(target), path)
        return
    content = tar.extractfile(member) if member.isreg() else None
    if content is None:
        raise UnfitArchive(f"its member {member.name!r} is neither file nor folder nor link")
    with content, path.open("xb") as file:
        shutil.copyfileobj(content, file, 1 << 20)
    path.chmod(0o755 if member.mode & 0o100 else 0o644)


def _place(member: tarfile.TarInfo, root: Path) -> Path:
    """Where a member goes: its name within the folder, followed through the links that are there."""
    if max(len(os.fsencode(name)) for name in (member.name, member.linkname)) > NAME_BYTES_MAX:
        raise UnfitArchive(f"it has a name of more than {NAME_BYTES_MAX} bytes")
    if "\0" in member.name or "\0" in member.linkname:
        raise UnfitArchive("it has a name with NUL in it")
    name = PurePosixPath(member.name)
    if name.is_absolute() or ".." in name.parts:
        raise UnfitArchive(f"its member {member.name!r} would lie outside of the folder")
    path = root / name
    if path != root:
        _demand_inside(member, path.parent, root)
    return path


def _demand_inside(member: tarfile.TarInfo, path: Path, root: Path) -> None:
    if not Path(os.path.realpath(path)).is_relative_to(root):
        to = f", a link to {member.linkname!r}," if member.issym() or member.islnk() else ""
        raise UnfitArchive(f"its member {member.name!r}{to} leads out of the folder")
