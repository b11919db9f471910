"""What a worker is about, and where in the script its threads are."""

from __future__ import annotations

import pytest

from keepstep.adapters.stacks import Frame, Thread
from keepstep.app.probing import read_threads
from keepstep.app.sampling import activity_of
from keepstep.core.stalls import Activity
from keepstep_worker import wire as wires
from keepstep_worker.wire import Progress

TENSORFLOW = Frame("/opt/venv/lib/python3.12/site-packages/tensorflow/python/eager/execute.py", 53, "quick_execute")
KERAS = Frame("/opt/venv/lib/python3.12/site-packages/keras/src/trainer.py", 371, "fit")
LIBRARY = Frame("/usr/lib/python3.12/threading.py", 355, "wait")
GUEST = Frame("/tmp/guest/keepstep_worker/bootstrap.py", 90, "main")


def script(line: int, function: str, file: str = "/opt/ml/code/train.py") -> Frame:
    return Frame(file, line, function)


def main_thread(*frames: Frame) -> Thread:
    return Thread("MainThread", True, frames)


@pytest.mark.parametrize(
    ("threads", "in_step", "calls"),
    [
        ([main_thread(TENSORFLOW, KERAS, script(50, "main"), GUEST)], True, ("train.py:50 main",)),
        ([main_thread(LIBRARY, script(31, "wait"), KERAS, script(50, "main"))], False, ("train.py:31 wait",)),
        (
            [Thread("loader", False, (LIBRARY, script(7, "load", "/opt/ml/code/data.py"))), main_thread(TENSORFLOW)],
            True,
            ("data.py:7 load",),
        ),
        ([Thread("idle", False, (LIBRARY,)), main_thread()], False, ()),
        ([], False, ()),
    ],
)
def test_the_innermost_call_of_the_script_is_named(threads, in_step, calls):
    assert read_threads(threads) == (in_step, calls)


def test_calls_are_few_and_short():
    threads = [Thread(str(n), False, (script(n, "f" * 500),)) for n in range(20)]
    _, calls = read_threads(threads)
    assert len(calls) == 6 and max(map(len, calls)) <= 120


@pytest.mark.parametrize(
    ("phase", "entered", "completed", "stepped", "in_a_loop", "wanted"),
    [
        (wires.PHASE_NONE, 0, 0, False, False, Activity.START),
        (wires.PHASE_HELLO, 0, 0, False, False, Activity.START),
        (wires.PHASE_JOINED, 1, 0, False, False, Activity.FIRST_STEP),
        (wires.PHASE_EPOCH, 1, 0, False, False, Activity.FIRST_STEP),
        (wires.PHASE_JOINED, 9, 8, True, False, Activity.STEP),
        (wires.PHASE_JOINED, 9, 9, True, False, Activity.PAUSE),
        (wires.PHASE_PAUSED, 9, 8, True, False, Activity.PAUSE),
        (wires.PHASE_EVALUATING, 9, 9, True, False, Activity.EVALUATION),
        (wires.PHASE_EPOCH, 9, 8, True, False, Activity.EPOCH),
        (wires.PHASE_JOINED, 9, 8, True, True, Activity.PAUSE),
        (wires.PHASE_FINISHED, 9, 9, True, False, Activity.FINISHED),
        (wires.PHASE_DRAINED, 9, 9, True, False, Activity.FINISHED),
    ],
)
def test_what_it_publishes_says_what_it_is_about(phase, entered, completed, stepped, in_a_loop, wanted):
    progress = Progress(phase=phase, entered_step=entered, completed_step=completed)
    assert activity_of(progress, stepped, in_a_loop) is wanted
