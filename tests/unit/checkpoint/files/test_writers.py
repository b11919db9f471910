"""Writers are seen, and copies of sets are whole or are not made. Source of the files: real ones, in `golden`."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.checkpoint.files import writers
from keepstep.checkpoint.files.contents import read_sets
from keepstep.checkpoint.files.sets import FileSet
from keepstep.checkpoint.files.unfit import ChangingFile, UnfitFile
from keepstep.checkpoint.files.writers import Writing, capture, writing

GOLDEN = Path(__file__).parent / "golden"
RUNTIME = Path(writers.__file__).parents[3]


def copied(name: str, target: Path) -> Path:
    folder = target / name
    folder.mkdir()
    for path in sorted((GOLDEN / name).iterdir()):  # one after the other, as they were written
        shutil.copyfile(path, folder / path.name)
    return folder


def last(folder: Path) -> FileSet:
    return read_sets(folder)[-1]


@contextlib.contextmanager
def opened_elsewhere(path: Path, mode: str) -> Iterator[None]:
    """A process that holds the file open."""
    code = "import sys; file = open(sys.argv[1], sys.argv[2]); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path), mode], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        try:
            yield
        finally:
            process.stdin.close()
            process.wait(30)


@pytest.fixture
def no_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, command: int, argument: int) -> int:
        raise OSError(errno.EINVAL, "refused")

    monkeypatch.setattr(writers.fcntl, "fcntl", refuse)


def check_writers(path: Path) -> None:
    path.write_bytes(b"x")
    assert writing(path) is Writing.NOBODY
    for mode, wanted in (("rb", Writing.NOBODY), ("r+b", Writing.SOMEBODY), ("ab", Writing.SOMEBODY)):
        with opened_elsewhere(path, mode):
            assert writing(path) is wanted
    with path.open("r+b"):
        assert writing(path) is Writing.SOMEBODY
    assert writing(path) is Writing.NOBODY


def test_a_writer_is_seen_by_a_lease(tmp_path: Path) -> None:
    check_writers(tmp_path / "file")


@pytest.mark.usefixtures("no_leases")
def test_a_writer_is_seen_without_leases(tmp_path: Path) -> None:
    check_writers(tmp_path / "file")


@pytest.mark.usefixtures("no_leases")
def test_processes_that_may_not_be_looked_at_are_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, proc = tmp_path / "file", tmp_path / "proc"
    path.write_bytes(b"x")
    (proc / "1").mkdir(parents=True)
    (proc / "2" / "fd").mkdir(parents=True)
    (proc / "version").touch()
    assert writing(path, proc) is Writing.NOBODY
    real = os.listdir

    def closed(folder: Path) -> list[str]:
        if folder.parent.name == "1":
            raise PermissionError
        return real(folder)

    monkeypatch.setattr(writers.os, "listdir", closed)
    assert writing(path, proc) is Writing.UNKNOWN
    assert writing(path, tmp_path / "none") is Writing.UNKNOWN


def test_only_files_can_be_asked_for(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("file")
    with pytest.raises(UnfitFile, match="wanted: a file that can be read"):
        writing(tmp_path / "link")
    with pytest.raises(ChangingFile, match="wanted: the file that was listed"):
        writing(tmp_path / "file")


def test_asking_ends_neither_the_asker_nor_the_writer(tmp_path: Path) -> None:
    """Who opens the file while it is leased has the kernel send a signal, of which the default is the end of us."""
    path = tmp_path / "file"
    path.write_bytes(b"x")
    ask = (
        "import sys; from pathlib import Path; from keepstep.checkpoint.files.writers import writing\n"
        "asked, seen = 0, set()\n"
        "while asked < 4000 or len(seen) < 2:\n"
        "    asked += 1\n"
        "    seen.add(writing(Path(sys.argv[1])))"
    )
    environment = {"PYTHONPATH": str(RUNTIME)}
    with subprocess.Popen([sys.executable, "-c", ask, str(path)], env=environment) as process:
        opened = 0
        while process.poll() is None:
            with path.open("r+b"):
                opened += 1
        assert process.returncode == 0
    assert opened > 100


@pytest.mark.parametrize("name", ["managed", "sharded", "iterator", "keras", "backup"])
def test_a_capture_is_the_same_set(name: str, tmp_path: Path) -> None:
    folder, target = copied(name, tmp_path), tmp_path / "captured"
    for found in read_sets(folder):
        capture(folder, found, target)
        (again,) = read_sets(target)
        assert (again.kind, again.name, again.step, again.is_named) == (
            *(found.kind, found.name, found.step, found.is_named),
        )
        for file in found.files:
            assert (target / file.name).read_bytes() == (folder / file.name).read_bytes()
        shutil.rmtree(target)


def test_data_files_are_linked_and_all_else_is_copied(tmp_path: Path) -> None:
    folder, target = copied("managed", tmp_path), tmp_path / "captured"
    capture(folder, last(folder), target)
    assert {path.name: (folder / path.name).samefile(path) for path in target.iterdir()} == {
        "ckpt-2.data-00000-of-00001": True,
        "ckpt-2.index": False,
        "checkpoint": False,
    }
    assert (target / "checkpoint").read_text().startswith('model_checkpoint_path: "ckpt-2"\n')


def test_a_capture_outlives_what_the_script_does_next(tmp_path: Path) -> None:
    """A save under the same prefix replaces the data files and writes over the index; a sweep deletes both."""
    folder, target = copied("managed", tmp_path), tmp_path / "captured"
    found = last(folder)
    capture(folder, found, target)
    shutil.copyfile(GOLDEN / "managed" / "ckpt-1.index", folder / "ckpt-2.index")
    shutil.rmtree(folder)
    (again,) = read_sets(target)
    capture(target, again, tmp_path / "second")


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM])
def test_what_can_not_be_linked_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise OSError(code, "refused")

    folder, target = copied("sharded", tmp_path), tmp_path / "captured"
    monkeypatch.setattr(writers.os, "link", refuse)
    monkeypatch.setattr(writers.os, "copy_file_range", refuse)
    capture(folder, last(folder), target)
    assert len(list(target.iterdir())) == 4
    assert not any((folder / path.name).samefile(path) for path in target.iterdir())


@pytest.mark.parametrize(("name", "file"), [("keras", "model.05.weights.h5"), ("managed", "ckpt-2.index")])
def test_a_file_that_is_open_for_writing_is_not_captured(name: str, file: str, tmp_path: Path) -> None:
    folder, target = copied(name, tmp_path), tmp_path / "captured"
    found = last(folder)
    with opened_elsewhere(folder / file, "r+b"):
        with pytest.raises(ChangingFile, match="open for writing"):
            capture(folder, found, target)
    assert not target.exists()
    capture(folder, found, target)


def rewrite(path: Path) -> None:
    """In place, the same bytes, later."""
    status = path.stat()
    path.write_bytes(path.read_bytes())
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


@pytest.mark.parametrize(
    ("name", "file"),
    [("keras", "model.05.weights.h5"), ("managed", "ckpt-2.index"), ("backup", "latest.weights.h5")],
)
def test_a_rewrite_in_place_during_the_copy_is_noticed(
    name: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, target = copied(name, tmp_path), tmp_path / "captured"
    found, copy = last(folder), writers._copy

    def disturbed(fd: int, out: Path, size_bytes: int) -> None:
        copy(fd, out, size_bytes)
        if out.name == file:
            rewrite(folder / file)

    monkeypatch.setattr(writers, "_copy", disturbed)
    with pytest.raises(ChangingFile, match=r"written to at \d+ ns; wanted: inode"):
        capture(folder, found, target)
    assert not target.exists()


def test_a_rewrite_behind_the_copy_of_a_pairs_first_file_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, target = copied("backup", tmp_path), tmp_path / "captured"
    found, copy = last(folder), writers._copy

    def disturbed(fd: int, out: Path, size_bytes: int) -> None:
        if out.name == "training_metadata.json":
            rewrite(folder / "latest.weights.h5")
        copy(fd, out, size_bytes)

    monkeypatch.setattr(writers, "_copy", disturbed)
    with pytest.raises(ChangingFile, match=r"latest\.weights\.h5"):
        capture(folder, found, target)


@pytest.mark.parametrize("file", ["ckpt-2.index", "ckpt-2.data-00000-of-00001"])
def test_a_set_that_was_replaced_or_swept_since_it_was_listed_is_not_captured(file: str, tmp_path: Path) -> None:
    folder, target = copied("managed", tmp_path), tmp_path / "captured"
    found = last(folder)
    (folder / "ckpt-1.index").replace(folder / "new")
    (folder / "new").replace(folder / file)
    with pytest.raises(ChangingFile, match="as it was listed"):
        capture(folder, found, target)
    (folder / file).unlink()
    with pytest.raises(ChangingFile, match="No such file"):
        capture(folder, found, target)
    assert not target.exists()


def test_a_sweep_behind_the_copy_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, target = copied("managed", tmp_path), tmp_path / "captured"
    found, copy = last(folder), writers._copy

    def swept(fd: int, out: Path, size_bytes: int) -> None:
        copy(fd, out, size_bytes)
        shutil.rmtree(folder)

    monkeypatch.setattr(writers, "_copy", swept)
    capture(folder, found, target)
    assert (target / "checkpoint").exists()


def test_content_that_is_not_whole_is_not_captured(tmp_path: Path) -> None:
    """The index of one save beside the data of another, which names and sizes do not tell."""
    folder, target = copied("managed", tmp_path), tmp_path / "captured"
    (folder / "ckpt-1.data-00000-of-00001").replace(folder / "ckpt-2.data-00000-of-00001")
    with pytest.raises(UnfitFile, match="masked CRC32C") as caught:
        capture(folder, last(folder), target)
    assert caught.value.found.endswith("of kernel/.ATTRIBUTES/VARIABLE_VALUE")
    assert caught.value.wanted and caught.value.file == str(folder / "ckpt-2.data-00000-of-00001")
    assert not target.exists()


def test_a_target_that_exists_is_left_alone(tmp_path: Path) -> None:
    folder = copied("managed", tmp_path)
    with pytest.raises(UnfitFile, match="File exists; wanted: a folder for the copy"):
        capture(folder, last(folder), folder)
    assert last(folder).name == "ckpt-2"


def test_a_disk_that_is_full_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folder, target = copied("keras", tmp_path), tmp_path / "captured"
    monkeypatch.setattr(writers.os, "copy_file_range", full)
    with pytest.raises(UnfitFile, match="No space left on device; wanted: room for the copy of a set"):
        capture(folder, last(folder), target)
    assert not target.exists()
