"""The journals of a real run fold again to every decision that was made; one byte altered in an event shows."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from keepstep.adapters.journal import JournalError
from keepstep.app.replay import ReplayDiffers, journals_under, replay
from tests.support.local_run import ROOT, LocalRun

ALTERED = 40

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that lost a worker, an agent, and was started again."""
    options = ("--set", "checkpoint.snapshot_every=4 steps", "--fault", "kill:1@12", "--fault", "kill-agent:0@30")
    folder = tmp_path_factory.mktemp("replay")
    words = ["--steps=50", f"--gate=20:{folder / 'first'}", f"--gate=40:{folder / 'second'}"]
    with LocalRun(folder / "run", "loop.py", words, options) as run:
        run.wait_for(lambda: len(run.events("worker_started", "algo-2")) > 1, "worker in the place of the killed one")
        (folder / "first").touch()
        run.wait_for(lambda: len(run.events("agent_started", "algo-1")) > 1, "agent in the place of the killed one")
        (folder / "second").touch()
        assert run.wait() == 0, run.told()
    assert run.summary()["restarts"] >= 2
    return run.folder / "hosts"


def keepstep_replay(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "keepstep", "replay", *words]
    return subprocess.run(
        command, env={"PYTHONPATH": str(ROOT / "runtime")}, capture_output=True, text=True, timeout=100
    )


def test_every_decision_is_reproduced(hosts: Path) -> None:
    journals = journals_under(hosts)
    assert [path.name for path in journals] == ["journal.jsonl.1", "journal.jsonl", "journal.jsonl"]
    told = keepstep_replay(str(hosts))
    assert told.returncode == 0, told.stderr
    lines = told.stdout.splitlines()
    assert len(lines) == len(journals)
    for line, path in zip(lines, journals, strict=True):
        events = [json.loads(text)["event"]["kind"] for text in path.read_text().splitlines() if '"event":' in text]
        assert line == f"{path}: {len(events)} turns, every decision reproduced"
        assert {"agent_started", "record_put", "worker_joined", "first_step_completed"} <= set(events)


def altered(line: bytes, draw: random.Random) -> bytes:
    """One byte of the event changed into another that may stand in JSON, so that it says something else."""
    while True:
        changed = one_byte_altered(line, draw)
        try:
            if json.loads(changed) != json.loads(line):
                return changed  # the last digit of a float may change nothing
        except ValueError:
            return changed


def one_byte_altered(line: bytes, draw: random.Random) -> bytes:
    begin, end = line.index(b'"event":') + len(b'"event":'), line.rindex(b"}")  # a turn's line ends with its event
    at = draw.randrange(begin, end)
    old = line[at : at + 1]
    digits, letters = b"0123456789", b"abcdefghijklmnopqrstuvwxyz"
    others = digits if old in digits else letters if old.lower() in letters else b" "
    new = draw.choice([byte for byte in others if byte != old[0]] or [ord("x")])
    return line[:at] + bytes([new]) + line[at + 1 :]


def test_one_altered_byte_in_an_event_is_found_and_its_turn_named(hosts: Path, tmp_path: Path) -> None:
    lines = journals_under(hosts)[-1].read_bytes().splitlines(keepends=True)
    turns = [number for number, line in enumerate(lines) if b'"event":' in line]
    draw = random.Random(7)
    path = tmp_path / "journal.jsonl"
    for number in draw.choices(turns[:-1], k=ALTERED):
        changed = altered(lines[number], draw)
        path.write_bytes(b"".join([*lines[:number], changed, *lines[number + 1 :]]))
        with pytest.raises((ReplayDiffers, JournalError)) as caught:
            for _ in replay(path):
                pass
        place = f"journal.jsonl:{number + 1}:"
        assert place in str(caught.value), (changed, lines[number])
        assert "not JSON" in str(caught.value) or f"turn {number}" in str(caught.value), changed
    told = keepstep_replay(str(path))
    assert told.returncode == 1
    assert place in told.stderr


def test_a_key_that_no_event_has_is_found(hosts: Path, tmp_path: Path) -> None:
    lines = journals_under(hosts)[-1].read_bytes().splitlines(keepends=True)
    number = next(number for number, line in enumerate(lines) if b'"exit_code":null' in line.partition(b'"event":')[2])
    changed = lines[number].replace(b'"exit_code":null', b'"exit_cide":null', 1)
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b"".join([*lines[:number], changed, *lines[number + 1 :]]))
    with pytest.raises(JournalError, match=rf"journal.jsonl:{number + 1}: turn {number}: found the event"):
        for _ in replay(path):
            pass
