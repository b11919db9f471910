"""Scripts that write checkpoints by themselves, killed at random: what is committed is whole, what is torn never is.

KEEPSTEP_TEST_ALL=1 kills each form 20 times, 100 times in all; else two forms are killed a few times.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from keepstep.adapters.store_directory import DirectoryStore
from keepstep.checkpoint.files.watched import Tree
from keepstep.checkpoint.filing.manifest import FilesManifest, read_files_manifest
from keepstep.checkpoint.filing.put_back import put_back
from keepstep.checkpoint.keys import files_line, manifests_prefix
from tests.support.local_run import PYTHON, LocalRun

EVERYTHING = bool(os.environ.get("KEEPSTEP_TEST_ALL"))
KILLS = 20 if EVERYTHING else 3
FORMS = ("manager", "backup", "keras", "weights", "tf_keras")
SAMPLE = ("manager", "weights")

pytestmark = [pytest.mark.e2e, pytest.mark.more, pytest.mark.timeout(900)]


def started(run: LocalRun) -> list[int]:
    """The epochs from which attempts have gone on."""
    path = run.folder / "results" / "started.jsonl"
    return [json.loads(line)["epoch"] for line in path.read_text().splitlines()] if path.exists() else []


def kept(run: LocalRun) -> list[int]:
    return [event["number"] for event in run.events("files_kept")]


def committed(store: DirectoryStore) -> list[FilesManifest]:
    """All that were ever committed and not swept, the oldest first."""
    (job,) = {key.partition("/")[0] for key in store.list("")}
    line = files_line(job)
    found = [read_files_manifest(store, line, key) for key in store.list(manifests_prefix(line))]
    return sorted(found, key=lambda manifest: manifest.name)


def loaded(form: str, store: DirectoryStore, manifests: list[FilesManifest], folder: Path) -> list[int]:
    """What plain TensorFlow or Keras finds in each."""
    folders = []
    for number, manifest in enumerate(manifests):
        folders.append(folder / str(number))
        put_back(store, manifest, Tree(folders[-1]), own=False)
    asked = "".join(f"{form} {each}\n" for each in folders)
    answers = subprocess.run(
        [PYTHON, str(Path(__file__).with_name("load_own_files.py"))],
        input=asked, capture_output=True, text=True, timeout=300, check=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
    ).stdout.splitlines()  # fmt: skip
    assert all(answer.isdecimal() for answer in answers), answers
    return [int(answer) for answer in answers]


@pytest.mark.parametrize("form", FORMS if EVERYTHING else SAMPLE)
def test_what_is_committed_is_whole_whenever_the_script_dies(tmp_path: Path, form: str) -> None:
    rng, store_folder = random.Random(f"own files {form}"), tmp_path / "store"
    folder = tmp_path / "run" / "hosts" / "algo-1" / "checkpoints"
    options = [
        *("--store", str(store_folder), "--set", "launch.instrument=off", "--set", "restart.budget=100 per 1h"),
        *(
            "--set",
            f"checkpoint.watch={folder}",
            "--set",
            "checkpoint.keep.last=1000",
            "--set",
            "restart.backoff.first=1ms",
        ),
    ]
    arguments = ["--folder", str(folder), "--form", form, "--epochs", "99999"]
    with LocalRun(tmp_path / "run", "own_files.py", arguments, options, hosts=1) as run:
        for kill in range(KILLS):
            run.wait_for(lambda kill=kill: len(started(run)) > kill, "an attempt that goes on")
            before = len(kept(run))
            run.wait_for(lambda before=before: len(kept(run)) > before, "a checkpoint that is kept")
            time.sleep(rng.uniform(0.0, 1.0))  # somewhere in a save, or between two
            pid = run.events("worker_started")[-1]["pid"]
            os.kill(pid, signal.SIGKILL)
        run.wait_for(lambda: len(started(run)) > KILLS, "the last attempt")
        run.terminate()
        assert run.wait() == 143, run.told()
    store = DirectoryStore(store_folder)
    manifests = committed(store)
    numbers = loaded(form, store, manifests, tmp_path / "back")
    assert numbers == sorted(numbers) and numbers[-1] > 0
    went_on = started(run)
    assert len(went_on) == KILLS + 1 and went_on == sorted(went_on)
    assert "TORN" not in run.log("algo-1")
    assert numbers[-1] >= went_on[-1]
