"""The account: whatever happens, its buckets add up to the time that has passed; what was in vain is moved."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core import events as e
from keepstep.core import goodput
from keepstep.core.goodput import Account, Bucket, productive_at, resumed
from tests.scenarios.stage import START, Stage


class Accounted(Stage):
    """A stage that keeps the account of its node."""

    def __init__(self, *args: object, **keywords: object) -> None:
        super().__init__(*args, **keywords)  # type: ignore[arg-type]
        self.account = Account(START)

    def after(self, event, decision):
        self.account = goodput.after(self.account, decision.state, event, self.now)

    def seconds(self) -> dict[str, float]:
        return {bucket.value: round(each, 3) for bucket, each in self.account.seconds.items() if each}


def test_training_is_productive_and_a_snapshot_is_not():
    stage = Accounted(hosts=1)
    stage.trains("8")
    stage.steps("16", "0.1")
    assert stage.seconds() == {"productive": 0.4, "snapshot": 0.1, "tracing": 0.5}
    assert stage.account.total_s == pytest.approx(1.0)


def test_what_is_done_again_was_lost_and_a_fault_is_detected_late():
    stage = Accounted(hosts=1)
    stage.trains("8")
    for step in ("16", "24"):
        stage.steps(step)
    stage.page = {slab: seal for slab, seal in stage.page.items() if seal.step <= 8}
    stage.waits("1")
    stage.dies()
    stage.waits("0.2")
    assert stage.account.worker_id == "one.1"
    lost = stage.seconds()["lost_steps"]
    assert lost == pytest.approx(2.0, abs=0.1)
    assert stage.account.total_s == pytest.approx(stage.now - START)


def test_a_script_that_comes_to_its_training_late_has_not_trained_before():
    stage = Accounted(hosts=1)
    stage.starts()
    stage.happens(e.WorkerStarted(stage.worker, 7))
    stage.happens(e.WorkerHello(stage.worker))
    stage.waits("100")
    stage.waits("100")
    assert stage.seconds()["productive"] == pytest.approx(100.0)
    stage.happens(e.WorkerJoined(stage.worker, "loop"))
    assert stage.seconds() == {"import": 200.0}
    assert stage.account.total_s == pytest.approx(stage.now - START)


def test_a_gap_is_counted_where_nobody_kept_the_account():
    account = resumed(Account(10.0, Bucket.PRODUCTIVE, {Bucket.PRODUCTIVE: 4.0}), 12.5, Bucket.DETECT)
    assert account.seconds == {Bucket.PRODUCTIVE: 4.0, Bucket.DETECT: 2.5}
    assert (account.at, account.bucket) == (12.5, Bucket.START)


@pytest.mark.parametrize(("step", "seconds"), [(0, 1.0), (10, 1.0), (15, 2.0), (20, 3.0), (99, 3.0)])
def test_productive_seconds_lie_between_the_marks(step, seconds):
    assert productive_at(((10, 1.0), (20, 3.0)), step) == seconds


COMMANDS = st.sampled_from(
    [
        ("steps",),
        ("waits", "0.3"),
        ("waits", "7"),
        ("dies",),
        ("joins",),
        ("raises",),
        ("interrupted",),
        ("freezes", "9"),
    ]
)


@given(st.lists(COMMANDS, max_size=12))
def test_whatever_happens_the_buckets_add_up(commands):
    stage = Accounted(hosts=1)
    stage.trains("8")
    step = 8
    for name, *values in commands:
        if not stage.state.workers and name in ("steps", "dies", "joins", "raises"):
            continue
        if name == "steps":
            step += 4
            values = [str(step)]
        if stage.state.exit_code is None:
            getattr(stage, name)(*values)
    assert all(each >= 0.0 for each in stage.account.seconds.values())
    assert stage.account.total_s == pytest.approx(stage.account.at - START)
