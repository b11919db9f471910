"""The list of cordons: an entry for each GPU or machine, the first evidence stays, what is no entry is none."""

from __future__ import annotations

import json

import pytest

from keepstep.adapters.store_memory import MemoryStore
from keepstep.app.cli import main
from keepstep.app.papers import perform
from keepstep.checkpoint.cordons import cordoned_jobs, keep_cordon, lift_cordons, parse_cordon, read_cordons
from keepstep.checkpoint.keys import cordon_key
from keepstep.checkpoint.strict_json import MalformedDocument
from keepstep.core.gpu_events import KeptCordon

ONE = KeptCordon("GPU-a", "algo-2", "health", "Xid 79", 20.0)
OTHER = KeptCordon("7f3c-boot", "algo-1", "ada", "slow fan", 10.0)
GOLDEN = b'{"at":20.0,"by":"health","host":"algo-2","version":1,"what":"GPU-a","why":"Xid 79"}\n'


def test_an_entry_is_what_was_kept_until_it_is_lifted():
    store = MemoryStore(lambda: 0.0)
    assert keep_cordon(store, "job", ONE) and keep_cordon(store, "job", OTHER)
    assert read_cordons(store, "job") == [OTHER, ONE]
    assert (read_cordons(store, "another"), cordoned_jobs(store)) == ([], ("job",))
    lift_cordons(store, "job", ["GPU-a", "GPU-z"])
    assert read_cordons(store, "job") == [OTHER]


def test_the_first_evidence_stays():
    store = MemoryStore(lambda: 0.0)
    keep_cordon(store, "job", ONE)
    assert not keep_cordon(store, "job", KeptCordon("GPU-a", "algo-3", "health", "Xid 48", 30.0))
    assert read_cordons(store, "job") == [ONE]


def test_the_format_is_version_1():
    store = MemoryStore(lambda: 0.0)
    keep_cordon(store, "job", ONE)
    assert store.read("job/cordons/GPU-a.json", 1000) == GOLDEN
    assert parse_cordon(GOLDEN, "a key") == ONE


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", GOLDEN.replace(b":1,", b":2,"), GOLDEN.replace(b"20.0", b'"x"'), b"\xff"]
)
def test_what_is_no_entry_is_passed_over(content):
    with pytest.raises(MalformedDocument, match="a key"):
        parse_cordon(content, "a key")
    store = MemoryStore(lambda: 0.0)
    store.put("job/cordons/x.json", content)
    keep_cordon(store, "job", ONE)
    assert read_cordons(store, "job") == [ONE]


@pytest.mark.parametrize("what", ["../HEAD", "a/b", "", ".", "GPU-" + "x" * 40])
def test_whatever_a_gpu_is_called_its_key_is_below_the_list(what):
    key = cordon_key("job", what)
    assert key.startswith("job/cordons/") and key.count("/") == 2 and key.endswith(".json")


def test_the_uploader_keeps_reads_and_lifts():
    store = MemoryStore(lambda: 0.0)
    entries = [{"what": "GPU-a", "host": "algo-2", "by": "health", "why": "Xid 79", "at": 20.0}]
    assert perform("cordon", {"cordons": entries, "lifted": []}, store, "job") == {}
    assert perform("cordons", {}, store, "job") == {"cordons": entries}
    assert perform("cordon", {"cordons": [], "lifted": ["GPU-a"]}, store, "job") == {}
    assert perform("cordons", {}, store, "job") == {"cordons": []}


@pytest.fixture
def store(tmp_path):
    from keepstep.adapters.store_directory import DirectoryStore

    made = DirectoryStore(tmp_path / "store")
    for job, entry in (("job", ONE), ("job", OTHER)):
        keep_cordon(made, job, entry)
    return tmp_path / "store"


def test_the_command_shows_and_lifts(store, capsys):
    assert main(["cordons", str(store)]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].split() == ["what", "host", "by", "since", "why"]
    assert told[1].split() == ["7f3c-boot", "algo-1", "ada", "1970-01-01", "00:00:10Z", "slow", "fan"]
    assert main(["cordons", str(store), "--lift", "GPU-a", "--json"]) == 0
    assert [each["what"] for each in json.loads(capsys.readouterr().out)["cordons"]] == ["7f3c-boot"]
    assert main(["cordons", str(store), "--lift", "all"]) == 0
    assert "nothing is cordoned" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--lift", "GPU-z"], "--lift: found GPU-z"),
        (["--job", "another", "--lift", "GPU-a"], "nothing is cordoned"),
    ],
)
def test_what_the_list_does_not_have_can_not_be_lifted(store, capsys, words, says):
    assert main(["cordons", str(store), *words]) == 78
    assert says in capsys.readouterr().err


def test_of_several_jobs_one_has_to_be_named(store, capsys):
    from keepstep.adapters.store_directory import DirectoryStore

    keep_cordon(DirectoryStore(store), "more", ONE)
    assert main(["cordons", str(store)]) == 78
    assert "job, more" in capsys.readouterr().err
