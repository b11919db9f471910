"""`keepstep checkpoint`, as it is typed, against stores in directories."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path

import pytest

from keepstep.adapters.store_directory import DirectoryStore
from keepstep.app.cli import main
from tests.support.stores import committed, rank_slab


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A store with three checkpoints of one job."""
    store = DirectoryStore(tmp_path / "store")
    for generation, step in ((1, 20), (1, 30), (2, 40)):
        committed(store, generation, step)
    return tmp_path / "store"


def keepstep(*words: object) -> int:
    return main(["checkpoint", *map(str, words)])


def spoil(place: Path, pattern: str) -> Path:
    path = next(iter(sorted(place.rglob(pattern))))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    return path


def test_listing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert keepstep("ls", place) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["step", "generation", "hosts", "size", "created", "name"]
    assert [row.split()[:3] for row in rows] == [["40", "2", "2"], ["30", "1", "2"], ["20", "1", "2"]]
    assert rows[0].endswith("2-40-r  newest") and rows[1].endswith("1-30-r")
    assert keepstep("ls", place, "--json", "--job", "job") == 0
    listed = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in listed["checkpoints"]] == ["2-40-r", "1-30-r", "1-20-r"]
    shared = len(b"weights after step 40; " * 9)  # stored once for both ranks
    assert listed["checkpoints"][0]["bytes"] == len(rank_slab(0, 40)) + len(rank_slab(1, 40)) - shared


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["verify", "all"], "2-40-r [##############################]"),
        (["diff", "30", "40"], "reading [##############################]"),
        (["copy", "OTHER", "all"], "1-20-r [##############################]"),
        (["export", "--to", "OUT.safetensors"], "OUT.safetensors [##############################]"),
        (["prune", "--keep-last", "1"], "deleted 14 objects"),
    ],
)
def test_what_takes_long_shows_on_a_terminal_how_far_it_is(place, tmp_path, monkeypatch, words, shown) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.chdir(tmp_path)
    what, *others = words
    assert keepstep(what, place, *others) == (1 if what == "diff" else 0)
    assert shown in sys.stderr.getvalue()
    assert sys.stderr.getvalue().endswith("\r\x1b[K"), "nothing of it stays"


def test_a_directory_encrypts_nothing(place, tmp_path, capsys) -> None:
    assert keepstep("copy", place, tmp_path / "other", "--encryption", "kms") == 78
    assert "--encryption: found kms for" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_showing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert keepstep("show", place, 30, "--rank", 1) == 0
    told = capsys.readouterr().out
    assert "job: step 30 of generation 1, 2 hosts" in told
    assert "replicated/w" in told and "U8 [24]" in told
    assert keepstep("show", place, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["manifest"]["step"] == 40
    assert [each["key"] for each in shown["tensors"]] == ["replicated/w", "local/moments"]


def test_verifying(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert keepstep("verify", place, "all") == 0
    assert capsys.readouterr().out.splitlines() == ["2-40-r: sound", "1-30-r: sound", "1-20-r: sound"]
    spoilt = spoil(place, "g1/s30/local-1.r")
    assert keepstep("verify", place, 40, 30, 20) == 1
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "2-40-r: sound" and told[2] == "1-20-r: sound"
    assert told[1].startswith(f"1-30-r: {spoilt.relative_to(place)}: CRC32C")


def test_a_head_that_is_wrong_is_told(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = place / "job" / "HEAD.json"
    head = json.loads(path.read_text())
    path.write_text(json.dumps(head | {"digest": "crc32c:00000000"}))
    assert keepstep("verify", place) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"HEAD: its digest is crc32c:00000000, that of 2-40-r {head['digest']}", "2-40-r: sound",
    ]  # fmt: skip
    path.write_text(json.dumps(head))
    (place / head["manifest"]).unlink()
    assert keepstep("verify", place, "all") == 1
    assert capsys.readouterr().out.splitlines() == [
        f"HEAD: it names {head['manifest']}, which is not there", "1-30-r: sound", "1-20-r: sound",
    ]  # fmt: skip


def test_a_newest_one_that_can_not_be_read_is_told_not_passed_over(place: Path, tmp_path: Path, capsys) -> None:
    (place / "job/manifests/2-40-r.json").write_text("{}")
    assert keepstep("ls", place) == 0
    assert "newest, " in capsys.readouterr().out.splitlines()[1]
    assert keepstep("copy", place, tmp_path / "one") == 1
    assert "2-40-r: not copied: " in capsys.readouterr().err
    assert keepstep("copy", place, tmp_path / "all", "all") == 1
    told = capsys.readouterr()
    assert told.out.splitlines() == ["1-20-r: copied", "1-30-r: copied"]
    assert "2-40-r: not copied: " in told.err
    assert keepstep("verify", tmp_path / "all", "all") == 0


def test_nothing_is_pruned_where_the_newest_can_not_be_read(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "job/manifests/2-40-r.json").write_text("{}")
    before = sorted(place.rglob("*"))
    assert keepstep("prune", place, "--keep-last", 1) == 1
    assert "keepstep: " in capsys.readouterr().err
    assert sorted(place.rglob("*")) == before


def test_comparing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert keepstep("diff", place, 30, "1-30-r") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "0 of 2 tensors differ"
    assert keepstep("diff", place, 20) == 1
    assert "2 of 2 tensors differ" in capsys.readouterr().out


def test_copying(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "elsewhere"
    assert keepstep("copy", place, target, 30) == 0
    assert keepstep("copy", place, target, "all") == 0
    capsys.readouterr()
    assert keepstep("verify", target, "all") == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert keepstep("copy", place, target, 20) == 1
    told = capsys.readouterr()
    assert told.out == "1-20-r: copied\n"
    assert f"{target}: HEAD stays as it is: HEAD belongs to generation 2" in told.err


def test_an_object_of_another_size_is_not_taken_for_a_copy(place: Path, tmp_path: Path, capsys) -> None:
    target = tmp_path / "elsewhere"
    assert keepstep("copy", place, target, 30) == 0
    path = target / "job/objects/g1/s30/local-1.r"
    path.write_bytes(path.read_bytes()[:-1])
    capsys.readouterr()
    assert keepstep("copy", place, target, 30) == 1
    told = capsys.readouterr()
    assert told.out == "" and "local-1.r: the target has" in told.err


def test_pruning(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert keepstep("prune", place, "--keep-last", 1, "--keep-every", 20) == 0
    assert capsys.readouterr().out.startswith("deleted 1 checkpoints, 6 objects")
    assert keepstep("ls", place, "--json") == 0
    assert [each["step"] for each in json.loads(capsys.readouterr().out)["checkpoints"]] == [40, 20]


def test_exporting(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "state.safetensors"
    assert keepstep("export", place, 30, "--rank", 1, "--to", path) == 0
    assert path.read_bytes() == rank_slab(1, 30)
    path.write_bytes(b"what was there")
    spoil(place, "g1/s30/replicated-1-of-2.r")
    assert keepstep("export", place, 30, "--to", path) == 1
    assert path.read_bytes() == b"what was there"
    assert sorted(tmp_path.iterdir()) == [path, place]
    assert "CRC32C" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["ls", "nowhere"], 78, "no directory"),
        (["ls", "{place}", "--job", "other", "--json"], 0, ""),
        (["show", "{place}", "99"], 78, "has no checkpoint 99"),
        (["show", "{place}", "--rank", "2"], 78, "0 to 1"),
        (["show", "{place}", "--rank", "-1"], 78, "0 to 1"),
        (["prune", "{place}", "--keep-last", "0"], 78, "--keep-last of at least 1"),
        (["export", "{place}", "--to", "/proc/no/file"], 78, "/proc/no/file"),
        (["export", "{place}", "--to", "/"], 78, "found '/'; wanted the name of a file"),
        (["export", "{place}", "--to", "m.keras"], 78, "found m.keras and no builder"),
        (["export", "{place}", "--to", "m.safetensors", "--builder", "m.py:f"], 78, "or no builder"),
        (["export", "{place}", "--to", "nowhere/m.keras", "--builder", "m.py:f"], 78, "found no folder nowhere"),
        (["export", "{place}", "--to", "m.keras", "--builder", "m.py:f", "--python", "/no/python"], 78, "/no/python"),
        (["export", "{place}", "--to", "m.keras", "--builder", "m.py:f", "--python", "false"], 78, "ended with 1"),
        (["export", "{place}", "--to", "m.keras", "--builder", "m.py:f", "--python", "true"], 78, "has said nothing"),
        (["ls", "gs://bucket/prefix"], 77, "gs://"),
        (["verify", "{empty}"], 78, "no job's checkpoints"),
    ],
)
def test_what_can_not_be_is_said(
    words: list[str], code: int, told: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    filled = [word.format(place=place, empty=tmp_path / "empty") for word in words]
    assert keepstep(*filled) == code
    assert told in capsys.readouterr().err


def test_several_jobs_in_one_store_want_a_name(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "twin").mkdir()
    (place / "twin" / "HEAD.json").write_bytes((place / "job" / "HEAD.json").read_bytes())
    assert keepstep("ls", place) == 78
    assert "the jobs job, twin" in capsys.readouterr().err


# --- files that scripts wrote ----------------------------------------------------------------------------------------

GOLDEN = Path(__file__).parent / "checkpoint" / "files" / "golden"


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """What a CheckpointManager has left."""
    return Path(shutil.copytree(GOLDEN / "managed", tmp_path / "written"))


def test_files_of_scripts_are_listed_and_read(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert keepstep("files", written) == 0
    head, *rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert head[:3] == ["name", "kind", "step"]
    assert [(row[0], row[1], row[-1]) for row in rows] == [
        ("ckpt-2", "tensorflow", "whole"),
        ("ckpt-1", "tensorflow", "whole"),
    ]


def test_a_file_that_is_torn_is_named(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torn = spoil(written, "ckpt-2.data-*")
    assert keepstep("files", written, "--json") == 1
    newest, other = json.loads(capsys.readouterr().out)["sets"]
    assert str(torn) in newest["trouble"] and "wanted" in newest["trouble"]
    assert (newest["name"], other["name"], other["trouble"]) == ("ckpt-2", "ckpt-1", "")


def test_a_file_that_is_open_for_writing_is_not_relied_on(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (written / "ckpt-2.index").open("ab"):
        assert keepstep("files", written) == 1
    assert "is being written" in capsys.readouterr().out


def test_a_folder_that_is_not_there_is_a_wrong_argument(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert keepstep("files", tmp_path / "none") == 78
    assert str(tmp_path / "none") in capsys.readouterr().err
