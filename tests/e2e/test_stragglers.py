"""One of two ranks is slow: it is named, and what it is slow in. `make bench-straggler` plays it often, and slower."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from benchmarks.straggler import HOSTS, HOWS, SETTLED_STEPS, Run, slow_down
from tests.support.local_run import PYTHON

pytestmark = [pytest.mark.e2e, pytest.mark.more, pytest.mark.timeout(300)]

TIMES = 10.0
KNOBS = ("straggler.slower_than=2.0", "straggler.window=5")
"""On a busy machine ranks differ by themselves: what is shown here is whom and what it names, not how little."""


@pytest.mark.sample(1)
@pytest.mark.parametrize(("how", "kind", "rank"), [
    ("loop", "compute", 0), ("fit", "data", 1), ("legacy", "compute", 1),
])  # fmt: skip
def test_the_slow_rank_is_named_and_what_it_is_slow_in(tmp_path, how, kind, rank):
    assert how in HOWS
    with ExitStack() as after:
        run = Run(tmp_path, PYTHON, how, KNOBS)
        after.callback(run.end)
        run.wait_for(lambda: run.step >= SETTLED_STEPS and len(run.ready) == HOSTS, "standbys")
        after.callback(slow_down(run, kind, rank, TIMES))
        before = len(run.found)  # until now anyone may have been slow
        run.wait_for(lambda: run.found[before:], "straggler")
        run.end()
    assert run.found[before][:2] == (rank, kind)
