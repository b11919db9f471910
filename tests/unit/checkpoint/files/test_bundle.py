"""TensorFlow's own files, read without TensorFlow; whatever was done to them is found."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from keepstep.checkpoint.digests import crc32c
from keepstep.checkpoint.files.bundle import Index, check_bundle, check_tensors, parse_index
from keepstep.checkpoint.files.table import MAGIC, mask, parse_table
from keepstep.checkpoint.files.unfit import UnfitFile

GOLDEN = Path(__file__).parent / "golden"
BUNDLES = [
    ("managed", "ckpt-1"),
    ("managed", "ckpt-2"),
    ("sharded", "model.ckpt-40"),
    ("iterator", "pipeline"),
    ("sliced", "parts"),
    ("many", "ckpt-7"),
]
VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"


@pytest.fixture
def managed(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "managed", tmp_path / "managed"))


def golden_index(folder: str, prefix: str) -> bytes:
    return (GOLDEN / folder / f"{prefix}.index").read_bytes()


def varint(number: int) -> bytes:
    return bytes([number & 0x7F | 0x80]) + varint(number >> 7) if number > 0x7F else bytes([number])


def block(entries: list[tuple[bytes, bytes]], restarts: tuple[int, ...] = (0,)) -> bytes:
    body = b"".join(b"\0" + varint(len(key)) + varint(len(value)) + key + value for key, value in entries)
    return body + b"".join(place.to_bytes(4, "little") for place in (*restarts, len(restarts)))


def table(entries: list[tuple[bytes, bytes]], compression: int = 0) -> bytes:
    """A table of one data block."""
    found, handles = b"", []
    for content in (block(entries), block([])):
        handles.append(varint(len(found)) + varint(len(content)))
        found += sealed(content, compression)
    content = block([(b"zzz", handles[0])])
    handles.append(varint(len(found)) + varint(len(content)))
    found += sealed(content, 0)
    return found + (handles[1] + handles[2]).ljust(40, b"\0") + MAGIC.to_bytes(8, "little")


def sealed(content: bytes, compression: int) -> bytes:
    content += bytes([compression])
    return content + mask(crc32c(content)).to_bytes(4, "little")


@pytest.mark.parametrize(("folder", "prefix"), BUNDLES)
def test_what_tensorflow_wrote_is_whole(folder: str, prefix: str) -> None:
    index = check_bundle(GOLDEN / folder, prefix)
    files = (GOLDEN / folder).glob(f"{prefix}.data-*")
    assert check_tensors(GOLDEN / folder, prefix, index) == sum(path.stat().st_size for path in files)


def test_types_shapes_and_places_are_read() -> None:
    index = check_bundle(GOLDEN / "managed", "ckpt-1")
    found = {
        tensor.name.removesuffix(VALUE): (tensor.dtype, tensor.shape, tensor.size_bytes) for tensor in index.tensors
    }
    assert found.pop("_CHECKPOINTABLE_OBJECT_GRAPH")[:2] == (7, ())
    assert found == {
        "empty": (1, (0, 3), 0),
        "flag": (10, (), 1),
        "half": (14, (5,), 10),
        "kernel": (1, (6, 8), 192),
        "save_counter": (9, (), 8),
        "words": (7, (3,), 273),
    }


def test_tensors_lie_in_several_data_files() -> None:
    index = check_bundle(GOLDEN / "sharded", "model.ckpt-40")
    assert (index.shards, sorted(tensor.shard for tensor in index.tensors)) == (3, [0, 1, 2])


def test_slices_lie_under_names_of_their_own() -> None:
    index = check_bundle(GOLDEN / "sliced", "parts")
    assert [tensor.shape for tensor in index.tensors] == [(2, 3), (2, 3)]


def test_an_index_of_several_blocks_is_read() -> None:
    assert len(golden_index("many", "ckpt-7")) > 4096
    assert len(check_bundle(GOLDEN / "many", "ckpt-7").tensors) == 150


@pytest.mark.parametrize(("folder", "prefix"), BUNDLES)
def test_no_truncated_index_passes(folder: str, prefix: str) -> None:
    whole = golden_index(folder, prefix)
    for size in range(len(whole)):
        with pytest.raises(UnfitFile, match=r"index: .+; wanted: "):
            parse_index(whole[:size], "index")


@pytest.mark.parametrize(
    ("folder", "prefix", "flip"),
    [*((*each, flip) for each in BUNDLES[:-1] for flip in (0x01, 0x80, 0xFF)), (*BUNDLES[-1], 0x80)],
)
def test_no_index_with_a_flipped_byte_passes(folder: str, prefix: str, flip: int) -> None:
    whole = bytearray(golden_index(folder, prefix))
    for place in range(len(whole)):
        whole[place] ^= flip
        with pytest.raises(UnfitFile, match=r"index: .+; wanted: "):
            parse_index(bytes(whole), "index")
        whole[place] ^= flip


def test_a_longer_index_does_not_pass() -> None:
    whole = golden_index("managed", "ckpt-1")
    for wrong in (whole + b"\0", b"\0" + whole, whole + whole, whole + golden_index("managed", "ckpt-2")):
        with pytest.raises(UnfitFile):
            parse_index(wrong, "index")


@pytest.mark.parametrize(("name", "prefix"), [("managed", "ckpt-1"), ("iterator", "pipeline")])
def test_every_flipped_byte_of_the_data_is_found(tmp_path: Path, name: str, prefix: str) -> None:
    folder = Path(shutil.copytree(GOLDEN / name, tmp_path / name))
    index = check_bundle(folder, prefix)
    path = folder / f"{prefix}.data-00000-of-00001"
    whole = path.read_bytes()
    with path.open("r+b", buffering=0) as file:
        for place in range(len(whole)):
            os.pwrite(file.fileno(), bytes([whole[place] ^ 0x10]), place)
            with pytest.raises(UnfitFile, match="data-00000-of-00001"):
                check_tensors(folder, prefix, index)
            os.pwrite(file.fileno(), whole[place : place + 1], place)
    assert check_tensors(folder, prefix, check_bundle(folder, prefix)) == len(whole)


def test_an_index_beside_the_data_of_another_save_is_found(managed: Path) -> None:
    (managed / "ckpt-2.data-00000-of-00001").replace(managed / "ckpt-1.data-00000-of-00001")
    index = check_bundle(managed, "ckpt-1")
    with pytest.raises(UnfitFile, match=r"masked CRC32C .* of kernel"):
        check_tensors(managed, "ckpt-1", index)


def test_missing_and_short_data_files_are_found(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(GOLDEN / "sharded", tmp_path / "sharded"))
    last = folder / "model.ckpt-40.data-00002-of-00003"
    whole = last.read_bytes()
    index = check_bundle(folder, "model.ckpt-40")
    last.write_bytes(whole[:-1])
    with pytest.raises(UnfitFile, match="00002-of-00003: 272 bytes; wanted: 273"):
        check_bundle(folder, "model.ckpt-40")
    with pytest.raises(UnfitFile, match="00002-of-00003: the file ends"):
        check_tensors(folder, "model.ckpt-40", index)
    last.unlink()
    for check in (lambda: check_bundle(folder, "model.ckpt-40"), lambda: check_tensors(folder, "model.ckpt-40", index)):
        with pytest.raises(UnfitFile, match="00002-of-00003: No such file"):
            check()


def test_a_disk_that_can_not_be_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    index = check_bundle(GOLDEN / "managed", "ckpt-1")
    monkeypatch.setattr(os, "pread", broken)
    with pytest.raises(UnfitFile, match=r"00000-of-00001: Input/output error; wanted: the values of "):
        check_tensors(GOLDEN / "managed", "ckpt-1", index)


def test_a_missing_index_is_found(tmp_path: Path) -> None:
    with pytest.raises(UnfitFile, match=r"ckpt-9.index: No such file or directory; wanted: an index"):
        check_bundle(tmp_path, "ckpt-9")


def test_compression_is_named() -> None:
    with pytest.raises(UnfitFile, match="compressed with Snappy"):
        parse_index(table([(b"", b"\x08\x01")], compression=1), "index")


HEADER = (b"", b"\x08\x01\x1a\x02\x08\x01")


def test_the_smallest_bundle_holds_nothing() -> None:
    assert parse_index(table([HEADER]), "index") == Index(1, ())


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([], "no header"),
        ([(b"a", b"")], "no header"),
        ([(b"", b"")], "0 data files"),
        ([(b"", b"\x08\x01\x10\x01")], "byte order 1"),
        ([(b"", b"\x08\x01\x1a\x02\x10\x02")], "readers of version 2"),
        ([(b"", b"\x08")], "the data end within the varint"),
        ([(b"", b"\x0b")], "wire type 3"),
        ([(b"", b"\x0a\x00")], "no number"),
        ([(b"", b"\x08\x01\x18\x01")], "no message"),
        ([HEADER, (b"a", b"\x18\x01")], "a in data file 1"),
        ([HEADER, (b"a", b"\x08\x01\x28\x05")], "a: 5 bytes; wanted: 4 for each value of"),
        ([HEADER, (b"a", b"\x12\x0d\x12\x0b\x08" + b"\xff" * 9 + b"\x01")], r"shape \[-1\]"),
        ([HEADER, (b"a", b"\x12\x0d\x12\x0b\x08" + b"\xff" * 9 + b"\x02")], "above 64 bits"),
        ([HEADER, (b"a", b"\x12\x05\x12")], "ends within the field"),
        ([HEADER, (b"b", b""), (b"a", b"")], "key b'a' behind b'b'"),
    ],
)
def test_messages_that_can_not_be_are_named(entries: list[tuple[bytes, bytes]], said: str) -> None:
    with pytest.raises(UnfitFile, match=said):
        parse_index(table(entries), "index")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xff\xff\xff",
        b"\x01\x01\x00k" + bytes(4) + b"\x01\0\0\0",
        b"\x00\x01\x09k" + bytes(4) + b"\x01\0\0\0",
        b"\x00\xff\xff\x7f\x00" + bytes(4) + b"\x01\0\0\0",
    ],
)
def test_blocks_that_can_not_be_are_refused(content: bytes) -> None:
    """A right CRC says that a block was written so, not that it makes sense."""
    first = sealed(content, 0)
    handle = varint(0) + varint(len(content))
    meta, index = block([]), block([(b"z", handle)])
    data = first + sealed(meta, 0) + sealed(index, 0)
    places = varint(len(first)) + varint(len(meta)) + varint(len(first) + len(sealed(meta, 0))) + varint(len(index))
    with pytest.raises(UnfitFile):
        parse_table(data + places.ljust(40, b"\0") + MAGIC.to_bytes(8, "little"), "index")
