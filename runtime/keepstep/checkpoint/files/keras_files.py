"""What Keras writes: `.keras` archives and HDF5 files, looked at without Keras and h5py.

A `.keras` file carries a CRC for each of its parts. An HDF5 file carries none for its data: its superblock says how
long the file is and whether a writer has closed it, so that what was cut short or left open is found, and a changed
value is not.
Source: the HDF5 file format specification, the ZIP format's; tried with files of Keras 3.15, h5py 3.14 (HDF5 1.14), and
with writers killed at every stage: until the file is closed the superblock's flags say that it is open for writing, in
version 0 too, where HDF5 itself ignores them and opens what is left.
"""

from __future__ import annotations

import lzma
import os
import struct
import zipfile
import zlib
from pathlib import Path
from typing import IO

from keepstep.checkpoint.files.unfit import UnfitFile

SIGNATURE = b"\x89HDF\r\n\x1a\n"
KERAS_PARTS = ("metadata.json", "config.json", "model.weights.h5")
_HEAD_BYTES = 64
_ADDRESS_BYTES = 8
_CHUNK_BYTES = 1 << 20


def check_keras(path: Path) -> None:
    """See that an archive is complete: all parts, each with the bytes that its CRC was made of, and whole weights.

    Raises:
        UnfitFile: it is not.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            missing = [part for part in KERAS_PARTS if part not in names]
            if missing:
                raise UnfitFile(path, f"no {', '.join(missing)} among {names[:20]}", "a model as Keras saves it")
            for info in archive.infolist():
                with archive.open(info) as part:
                    head = _read_all(part)
                if info.filename == KERAS_PARTS[-1]:
                    _check_superblock(head, info.file_size, f"{path}, {info.filename}")
    except OSError as error:
        raise UnfitFile(path, f"{error.strerror or error}", "a .keras archive") from error
    except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, ValueError, RuntimeError, struct.error) as error:
        raise UnfitFile(path, f"{error}", "a .keras archive whose parts are as they were written") from error


def check_hdf5(path: Path) -> None:
    """See that an HDF5 file was closed by its writer and is as long as it says.

    Raises:
        UnfitFile: it is not; changed data within it are not found.
    """
    try:
        with path.open("rb") as file:
            _check_superblock(file.read(_HEAD_BYTES), os.fstat(file.fileno()).st_size, str(path))
    except OSError as error:
        raise UnfitFile(path, f"{error.strerror}", "an HDF5 file") from error


def _read_all(part: IO[bytes]) -> bytes:
    """The first bytes of an archive's part; reading it to its end compares its CRC."""
    head = part.read(_HEAD_BYTES)
    while part.read(_CHUNK_BYTES):
        pass
    return head


def _check_superblock(head: bytes, size_bytes: int, file: str) -> None:
    if head[: len(SIGNATURE)] != SIGNATURE:
        raise UnfitFile(file, f"{head[:8].hex() or 'nothing'} in its first bytes", f"{SIGNATURE.hex()}, as HDF5 begins")
    version = head[8] if len(head) > 8 else -1
    if version in (0, 1):
        flags, end = _old_superblock(head, version, file)
    elif version in (2, 3):
        flags, end = _new_superblock(head, file)
    else:
        raise UnfitFile(file, f"superblock version {version}", "0 to 3")
    if flags:
        raise UnfitFile(file, f"consistency flags {flags:#x}: open for writing, or never closed", "0")
    if end != size_bytes:
        raise UnfitFile(file, f"{size_bytes} bytes", f"{end}, as its superblock says")


def _old_superblock(head: bytes, version: int, file: str) -> tuple[int, int]:
    """Consistency flags and end of the file, from versions 0 and 1, which have no checksum."""
    at = 24 if version == 0 else 28
    if len(head) < at + 4 * _ADDRESS_BYTES:
        raise UnfitFile(file, f"{len(head)} bytes", f"a superblock of version {version}")
    _check_address_bytes(head[13], file)
    (flags,) = struct.unpack_from("<I", head, 20)
    base, _, end, _ = struct.unpack_from("<4Q", head, at)
    _check_base(base, file)
    return flags, end


def _new_superblock(head: bytes, file: str) -> tuple[int, int]:
    """The same from versions 2 and 3."""
    body = 12 + 4 * _ADDRESS_BYTES
    if len(head) < body + 4:
        raise UnfitFile(file, f"{len(head)} bytes", f"a superblock of {body + 4}")
    _check_address_bytes(head[9], file)
    made, stored = lookup3(head[:body]), int.from_bytes(head[body : body + 4], "little")
    if made != stored:
        raise UnfitFile(file, f"checksum {made:08x} of its superblock", f"{stored:08x}, as it says")
    base, _, end, _ = struct.unpack_from("<4Q", head, 12)
    _check_base(base, file)
    return head[11], end


def _check_address_bytes(found: int, file: str) -> None:
    if found != _ADDRESS_BYTES:
        raise UnfitFile(file, f"addresses of {found} bytes", f"{_ADDRESS_BYTES}, as h5py writes")


def _check_base(base: int, file: str) -> None:
    if base:
        raise UnfitFile(file, f"base address {base}", "0, as h5py writes")


def lookup3(data: bytes) -> int:
    """Bob Jenkins' hash of bytes, which HDF5 takes as the checksum of its metadata.

    Source: his public-domain `lookup3.c`, `hashlittle` with a start of 0.
    """
    a = b = c = (0xDEADBEEF + len(data)) & 0xFFFFFFFF
    if not data:
        return c
    at = 0
    while len(data) - at > 12:
        words = struct.unpack_from("<3I", data, at)
        a, b, c = _mix(a + words[0], b + words[1], c + words[2])
        at += 12
    words = struct.unpack("<3I", data[at:].ljust(12, b"\0"))
    return _finish(a + words[0], b + words[1], c + words[2])


def _mix(a: int, b: int, c: int) -> tuple[int, int, int]:
    for shifts in ((4, 6, 8), (16, 19, 4)):
        a = (a - c) & 0xFFFFFFFF ^ _rotated(c, shifts[0])
        c += b
        b = (b - a) & 0xFFFFFFFF ^ _rotated(a, shifts[1])
        a += c
        c = (c - b) & 0xFFFFFFFF ^ _rotated(b, shifts[2])
        b += a
    return a & 0xFFFFFFFF, b & 0xFFFFFFFF, c & 0xFFFFFFFF


def _finish(a: int, b: int, c: int) -> int:
    for first, second, third in ((14, 11, 25), (16, 4, 14)):
        c = ((c ^ b) - _rotated(b, first)) & 0xFFFFFFFF
        a = ((a ^ c) - _rotated(c, second)) & 0xFFFFFFFF
        b = ((b ^ a) - _rotated(a, third)) & 0xFFFFFFFF
    return ((c ^ b) - _rotated(b, 24)) & 0xFFFFFFFF


def _rotated(value: int, bits: int) -> int:
    value &= 0xFFFFFFFF
    return ((value << bits) | (value >> (32 - bits))) & 0xFFFFFFFF
