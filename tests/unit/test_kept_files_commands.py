"""`keepstep checkpoint ... --files`, as it is typed, against stores in directories."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from keepstep.adapters.store_directory import DirectoryStore
from keepstep.app.cli import main
from keepstep.checkpoint.files.watched import Watched
from keepstep.checkpoint.filing.keeping import keep
from tests.support.script_files import contents, lay


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A store with two checkpoints of a script's own files, and none of slabs."""
    store, root = DirectoryStore(tmp_path / "store"), tmp_path / "checkpoints"
    watched = Watched(root, tmp_path / "spool")
    for number in (7, 8):
        lay("many", root / "tf", rename=("-7", f"-{number}"), at_s=1_000 * number)
        keep(store, "job", watched.scan()[0], 1, "r", 99)
    return tmp_path / "store"


def keepstep(*words: object) -> int:
    return main(["checkpoint", *map(str, words)])


def test_listing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert keepstep("ls", place) == 0
    assert "and 2 of the script's own files: see --files" in capsys.readouterr().out
    assert keepstep("ls", place, "--files") == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["number", "generation", "size", "created", "name", "sets"]
    assert rows[0].split()[-3:] == ["1-2-r", "tf/ckpt-8", "newest"] and rows[1].split()[-1] == "tf/ckpt-7"
    assert keepstep("ls", place, "--files", "--json") == 0
    assert [each["number"] for each in json.loads(capsys.readouterr().out)["files"]] == [2, 1]


def test_showing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert keepstep("show", place, 1, "--files") == 0
    told = capsys.readouterr().out
    assert "files number 1 of generation 1" in told and "ckpt-7.index" in told
    assert keepstep("show", place, "--files", "--json") == 0
    assert json.loads(capsys.readouterr().out)["manifest"]["step"] == 2


def test_verifying(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert keepstep("verify", place, "all", "--files") == 0
    path = next(iter(sorted(place.rglob("*-ckpt-7.data-*"))))
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert keepstep("verify", place, "all", "--files") == 1
    told = capsys.readouterr().out.splitlines()
    assert told[:2] == ["1-2-r: sound", "1-1-r: sound"]
    assert told[2] == "1-2-r: sound" and "CRC32C" in told[3]


def test_exporting(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert keepstep("export", place, "1-1-r", "--files", "--to", tmp_path / "out") == 0
    assert {Path(name).name for name in contents(tmp_path / "out")} == {"ckpt-7.index", "ckpt-7.data-00000-of-00001"}
    assert keepstep("export", place, "--files", "--to", tmp_path / "out") == 78
    assert "a folder that is empty or new" in capsys.readouterr().err


def test_copying(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other").mkdir()
    assert keepstep("copy", place, tmp_path / "other", "all", "--files") == 0
    assert keepstep("verify", tmp_path / "other", "all", "--files") == 0
    capsys.readouterr()
    assert keepstep("ls", tmp_path / "other", "--files", "--json") == 0
    assert [each["newest"] for each in json.loads(capsys.readouterr().out)["files"]] == [True, False]
    assert keepstep("copy", place, tmp_path / "other", 1, "--files") == 1
    assert "HEAD stays as it is" in capsys.readouterr().err


def test_pruning(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def left() -> list[int]:
        capsys.readouterr()
        assert keepstep("ls", place, "--files", "--json") == 0
        return [each["number"] for each in json.loads(capsys.readouterr().out)["files"]]

    assert keepstep("prune", place, "--files", "--keep-last", 0) == 78
    assert "--keep-last of at least 1" in capsys.readouterr().err
    assert keepstep("prune", place, "--files", "--keep-last", 1, "--keep-every", 1) == 0
    assert left() == [2, 1]
    assert keepstep("prune", place, "--files", "--keep-last", 1) == 0
    assert capsys.readouterr().out == "deleted 1 checkpoints, 2 objects, 0 unfinished uploads\n"
    assert left() == [2]
    assert keepstep("verify", place, "--files") == 0


def test_pruning_deletes_nothing_that_one_which_can_not_be_read_may_need(place: Path, capsys) -> None:
    newest = next(iter(place.rglob("manifests/1-2-r.json")))
    newest.write_bytes(b"{}")
    before = sorted(place.rglob("*"))
    assert keepstep("prune", place, "--files", "--keep-last", 1) == 1
    assert "1-2-r" in capsys.readouterr().err
    assert sorted(place.rglob("*")) == before


def test_what_there_is_not(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert keepstep("show", place, 99, "--files") == 78
    assert "has no checkpoint 99" in capsys.readouterr().err
