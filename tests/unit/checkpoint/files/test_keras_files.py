"""What Keras and h5py wrote, cut short, left open and changed."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from keepstep.checkpoint.files.keras_files import SIGNATURE, check_hdf5, check_keras, lookup3
from keepstep.checkpoint.files.unfit import UnfitFile

GOLDEN = Path(__file__).parent / "golden"
ARCHIVE = GOLDEN / "keras" / "model.05-0.21.keras"
HDF5 = [
    GOLDEN / "keras" / "model.05.weights.h5",
    GOLDEN / "keras" / "legacy.h5",
    GOLDEN / "backup" / "latest.weights.h5",
    GOLDEN / "h5" / "v2.h5",
    GOLDEN / "h5" / "v3.h5",
]
VERSIONS = {GOLDEN / "keras" / "model.05.weights.h5": 0, GOLDEN / "h5" / "v2.h5": 2, GOLDEN / "h5" / "v3.h5": 3}
FLAGS_AT = {0: 20, 2: 11, 3: 11}


def sizes(whole: bytes) -> list[int]:
    """Every length near the ends, and some between."""
    return sorted({*range(100), *range(0, len(whole), 211), *range(len(whole) - 60, len(whole))})


@pytest.mark.parametrize("path", HDF5, ids=lambda path: path.name)
def test_closed_files_are_whole(path: Path) -> None:
    check_hdf5(path)


def test_all_versions_are_tried() -> None:
    assert {path: path.read_bytes()[8] for path in VERSIONS} == VERSIONS


@pytest.mark.parametrize("path", HDF5, ids=lambda path: path.name)
def test_no_truncated_hdf5_passes(path: Path, tmp_path: Path) -> None:
    whole, cut = path.read_bytes(), tmp_path / path.name
    for size in sizes(whole):
        cut.write_bytes(whole[:size])
        with pytest.raises(UnfitFile, match=path.name):
            check_hdf5(cut)
    cut.write_bytes(whole + b"\0")
    with pytest.raises(UnfitFile, match=f"{len(whole) + 1} bytes; wanted: {len(whole)}"):
        check_hdf5(cut)


@pytest.mark.parametrize(("path", "version"), VERSIONS.items(), ids=lambda value: getattr(value, "name", str(value)))
def test_a_file_that_its_writer_did_not_close_is_found(path: Path, version: int, tmp_path: Path) -> None:
    """h5py killed behind a flush leaves the length right and the flags set."""
    content = bytearray(path.read_bytes())
    content[FLAGS_AT[version]] = 1
    if version:
        content[44:48] = lookup3(bytes(content[:44])).to_bytes(4, "little")
    (tmp_path / "open.h5").write_bytes(content)
    with pytest.raises(UnfitFile, match="open for writing"):
        check_hdf5(tmp_path / "open.h5")


@pytest.mark.parametrize("name", ["v2.h5", "v3.h5"])
def test_every_flipped_byte_of_a_newer_superblock_is_found(name: str, tmp_path: Path) -> None:
    content = bytearray((GOLDEN / "h5" / name).read_bytes())
    for place in range(48):
        content[place] ^= 0x40
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UnfitFile):
            check_hdf5(tmp_path / name)
        content[place] ^= 0x40


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "nothing in its first bytes"),
        (b"PK\x03\x04", "504b0304 in its first bytes"),
        (SIGNATURE, "superblock version -1"),
        (SIGNATURE + b"\x09", "superblock version 9"),
        (SIGNATURE + b"\x01" + bytes(70), "addresses of 0 bytes"),
        (SIGNATURE + b"\x00" + bytes(4) + b"\x08\x08" + bytes(9) + b"\x00\x02" + bytes(60), "base address 512"),
    ],
)
def test_what_is_no_hdf5_is_named(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "x.h5").write_bytes(content)
    with pytest.raises(UnfitFile, match=said):
        check_hdf5(tmp_path / "x.h5")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    for check in (check_hdf5, check_keras):
        with pytest.raises(UnfitFile, match="none: No such file"):
            check(tmp_path / "none")


@pytest.mark.parametrize(
    ("data", "wanted"),
    [(b"", 0xDEADBEEF), (b"Four score and seven years ago", 0x17770551)],
)
def test_the_hash_is_the_published_one(data: bytes, wanted: int) -> None:
    assert lookup3(data) == wanted


def test_an_archive_is_whole() -> None:
    check_keras(ARCHIVE)


def test_no_truncated_archive_passes(tmp_path: Path) -> None:
    whole, cut = ARCHIVE.read_bytes(), tmp_path / "cut.keras"
    for size in sizes(whole):
        cut.write_bytes(whole[:size])
        with pytest.raises(UnfitFile, match=r"cut\.keras"):
            check_keras(cut)


def test_a_flipped_byte_of_an_archives_parts_is_found(tmp_path: Path) -> None:
    whole = ARCHIVE.read_bytes()
    with zipfile.ZipFile(ARCHIVE) as archive:
        places = [info.header_offset + 60 + info.file_size // 2 for info in archive.infolist()]
    for place in places:
        (tmp_path / "x.keras").write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(UnfitFile, match="Bad CRC-32"):
            check_keras(tmp_path / "x.keras")


def test_flipped_bytes_of_an_archives_directory_raise_nothing_else(tmp_path: Path) -> None:
    """Not every byte of it matters (a date); none may raise what the caller does not await."""
    whole = ARCHIVE.read_bytes()
    found = 0
    for place in range(whole.index(b"PK\x01\x02"), len(whole)):
        (tmp_path / "x.keras").write_bytes(whole[:place] + bytes([whole[place] ^ 0x41]) + whole[place + 1 :])
        try:
            check_keras(tmp_path / "x.keras")
        except UnfitFile:
            found += 1
    assert found > 100


def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.keras"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("metadata.json", "{}")
        archive.writestr("config.json", "{}")
    with pytest.raises(UnfitFile, match=r"no model.weights.h5 among"):
        check_keras(path)


def test_weights_within_an_archive_must_be_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.keras"
    weights = (GOLDEN / "keras" / "model.05.weights.h5").read_bytes()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("metadata.json", "{}")
        archive.writestr("config.json", "{}")
        archive.writestr("model.weights.h5", weights[:-1])
    with pytest.raises(UnfitFile, match=r"x.keras, model.weights.h5: 11807 bytes; wanted: 11808"):
        check_keras(path)
