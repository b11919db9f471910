"""An archive of code is unpacked into its folder and nowhere else, and what is hostile in one is named."""

from __future__ import annotations

import gzip
import io
import os
import stat
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from keepstep.adapters.code_archive import UnfitArchive, unpack

Members = Iterable[tuple[tarfile.TarInfo, bytes]]


def file(name: str, content: bytes = b"print()\n", **changes: object) -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(content), 0o644
    for key, value in changes.items():
        setattr(member, key, value)
    return member, content


def special(name: str, kind: bytes, linkname: str = "") -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, linkname
    return member, b""


def link(name: str, to: str) -> tuple[tarfile.TarInfo, bytes]:
    return special(name, tarfile.SYMTYPE, to)


def hard(name: str, to: str) -> tuple[tarfile.TarInfo, bytes]:
    return special(name, tarfile.LNKTYPE, to)


def pack(path: Path, members: Members, mode: str = "w:gz", format: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(path, mode, format=format) as tar:  # type: ignore[call-overload]
        for member, content in members:
            tar.addfile(member, io.BytesIO(content))
    return path


@pytest.fixture
def into(tmp_path: Path) -> Path:
    folder = tmp_path / "outer" / "code"
    folder.mkdir(parents=True)
    (tmp_path / "outer" / "secret").write_text("theirs")
    return folder


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
def test_code_is_unpacked(tmp_path, into, mode):
    members = [
        special(".", tarfile.DIRTYPE),
        special("./package", tarfile.DIRTYPE),
        file("./train.py"),
        file("package/sub/__init__.py", b"deep = 1\n"),
        file("run.sh", b"#!/bin/sh\n", mode=0o4755, uid=12345, uname="nobody"),
        link("alias.py", "train.py"),
        link("package/up.py", "../train.py"),
        hard("same.py", "train.py"),
        file("train.py", b"second = 2\n"),
    ]
    assert unpack(pack(tmp_path / "archive", members, mode), into) == 8 + 9 + 10 + 11
    assert (into / "package" / "sub" / "__init__.py").read_text() == "deep = 1\n"
    assert (into / "alias.py").read_text() == (into / "package" / "up.py").read_text() == "second = 2\n"
    assert (into / "same.py").read_text() == "print()\n"
    modes = {name: stat.S_IMODE((into / name).stat().st_mode) for name in ("run.sh", "train.py")}
    assert modes == {"run.sh": 0o755, "train.py": 0o644}
    assert (into / "run.sh").stat().st_uid == os.geteuid()


HOSTILE: dict[str, tuple[Callable[[], Members], str]] = {
    "a path outside": (lambda: [file("../secret")], r"'\.\./secret' would lie outside"),
    "a path that goes out and in": (lambda: [file("a/../../code/x.py")], "would lie outside"),
    "an absolute path": (lambda: [file("/tmp/keepstep-x")], "'/tmp/keepstep-x' would lie outside"),
    "a link outside": (lambda: [link("out", "../secret")], r"'out', a link to '\.\./secret', leads out"),
    "an absolute link": (lambda: [link("out", "/etc/passwd")], "a link to '/etc/passwd', leads out"),
    "a file through a link": (lambda: [link("out", ".."), file("out/secret")], "leads out"),
    "a link through a link": (
        lambda: [special("d", tarfile.DIRTYPE), link("d/a", ".."), link("b", "d/a/../secret")],
        "'b'.* leads out",
    ),
    "a hard link outside": (lambda: [hard("x.py", "../secret")], "leads out"),
    "a hard link to nothing": (lambda: [hard("x.py", "none.py")], "which is not there"),
    "a device": (lambda: [special("sda", tarfile.BLKTYPE)], "'sda' is neither file nor folder nor link"),
    "a character device": (lambda: [special("null", tarfile.CHRTYPE)], "'null' is neither"),
    "a pipe": (lambda: [special("pipe", tarfile.FIFOTYPE)], "'pipe' is neither"),
    "a link in the folder's place": (lambda: [link(".", "..")], "stands for the folder itself"),
    "a sparse file that is none": (lambda: [file("x", pax_headers={"GNU.sparse.map": "x"})], "it can not be read"),
    "a long name": (lambda: [file("x" * 2000)], "a name of more than 1024 bytes"),
    "too many": (lambda: [file(f"{number}.py") for number in range(21)], "more than 20 members"),
    "too much": (lambda: [file("a", bytes(600)), file("b", bytes(600))], "more than 1000 bytes"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_hostile_is_named_and_does_nothing_outside(tmp_path, into, name):
    members, wrong = HOSTILE[name]
    archive = pack(tmp_path / "archive", members())
    outside = sorted((tmp_path / "outer").iterdir())
    with pytest.raises(UnfitArchive, match=wrong):
        unpack(archive, into, bytes_max=1000, members_max=20)
    assert (tmp_path / "outer" / "secret").read_text() == "theirs"
    assert sorted((tmp_path / "outer").iterdir()) == outside
    assert not Path("/tmp/keepstep-x").exists()


def test_ten_gigabytes_of_zeros_are_refused_by_their_first_block(tmp_path, into):
    member = tarfile.TarInfo("zeros")
    member.size = 10 << 30
    head = member.tobuf(tarfile.GNU_FORMAT)
    (tmp_path / "bomb").write_bytes(gzip.compress(head + bytes(1 << 20)))
    with pytest.raises(UnfitArchive, match="come to more than"):
        unpack(tmp_path / "bomb", into)
    assert list(into.iterdir()) == []


@pytest.mark.parametrize("keep", [0, 1, 10, 200, -9, -1])
def test_what_is_no_whole_archive_is_said(tmp_path, into, keep):
    archive = pack(tmp_path / "archive", [file("train.py", os.urandom(20_000))])
    archive.write_bytes(archive.read_bytes()[:keep])
    with pytest.raises(UnfitArchive, match="it can not be read"):
        unpack(archive, into)


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_an_archive_that_ends_between_two_members_is_cut_off(tmp_path, into, mode):
    whole = pack(tmp_path / "whole", [file("a.py"), file("b.py")], "w").read_bytes()
    (tmp_path / "cut").write_bytes(whole[:1024] if mode == "w" else gzip.compress(whole[:1024]))
    with pytest.raises(UnfitArchive, match="the mark at its end is missing"):
        unpack(tmp_path / "cut", into)
    (tmp_path / "short").write_bytes(whole[: 2 * 1024 + 512])  # one block of the mark's two
    assert unpack(tmp_path / "short", into) == 16


def test_a_flipped_bit_is_seen(tmp_path, into):
    archive = pack(tmp_path / "archive", [file("train.py", os.urandom(20_000))])
    data = bytearray(archive.read_bytes())
    data[-6] ^= 1  # in the checksum
    archive.write_bytes(data)
    with pytest.raises(UnfitArchive, match="it can not be read"):
        unpack(archive, into)
