"""A hundred hours of training that is slow now and then, evaluates for long and writes large checkpoints: no alarm."""

from __future__ import annotations

from collections import Counter

import pytest

from keepstep.core import actions as a
from keepstep.core.policy import Policy
from keepstep.core.stalls import Activity
from keepstep.simulation.host import SimHost
from keepstep.simulation.run import World
from keepstep.simulation.worker import SimWorker

HOURS_AT_ONCE, LAST_STEP = 25.0, 600
EVALUATES_EVERY, SAVES_EVERY = 50, 40
BATCH_MAX_S, SAVE_MAX_S, STEP_MAX_S = 1_100.0, 1_100.0, 55.0
"""Below the floors of the default policy."""


class SlowWorker(SimWorker):
    """Evaluates every so many steps, batch by batch; rank 0 then and now writes a checkpoint of its own."""

    _busy_before = 0
    _doing: Activity | None = None

    def activity(self) -> Activity:
        return self._doing or super().activity()

    def _enter(self) -> None:
        step = self.completed + 1
        if self._busy_before >= step:
            super()._enter()
        elif self.completed and self.completed % EVALUATES_EVERY == 0:
            self._evaluate(self.random.randint(1, 20))
        elif self.completed and self.completed % SAVES_EVERY == 0 and self.spec.rank == 0:
            self._doing, self.moved_at = Activity.PAUSE, self.host.world.clock.now
            self._after(self.random.uniform(1.0, SAVE_MAX_S), self._go_on)
        else:
            super()._enter()

    def _evaluate(self, batches: int) -> None:
        orders = self._orders()
        if not batches or (orders is not None and orders.hold):
            self._go_on()
            return
        self._doing, self.moved_at = Activity.EVALUATION, self.host.world.clock.now
        slow = self.random.random() < 0.02
        seconds = self.random.uniform(1.0, BATCH_MAX_S if slow else 60.0)
        self._after(seconds, lambda: self._evaluate(batches - 1))

    def _go_on(self) -> None:
        self._doing, self.moved_at = None, self.host.world.clock.now
        self._busy_before = self.completed + 1
        super()._enter()


class SlowWorld(World):
    """Steps of half a second to a minute."""

    def make_worker(self, host: SimHost, spec: a.StartWorker) -> SimWorker:
        return SlowWorker(host, spec, host.random)

    def step_s(self) -> float:
        return min(STEP_MAX_S, 0.5 * self.random.lognormvariate(0.0, 1.5))


@pytest.mark.parametrize("first", [0, 100, 200, 300])
def test_slow_steps_long_evaluations_and_checkpoints_are_no_hang(first):
    reasons: Counter[str] = Counter()
    hours, seed = 0.0, first
    while hours < HOURS_AT_ONCE:
        world = SlowWorld(seed, Policy(), 3, LAST_STEP)
        world.silent, world.faults_last_s = False, 24 * 3600.0
        world.play(())
        assert world.checkers.violations + world.checkers.at_the_end() == []
        assert world.coordinator.history[-1].restarts == 0
        hours += (world.clock.now - 1_000_000.0) / 3600.0
        reasons += world.reasons
        seed += 1
    assert reasons["past_deadline"] > 10  # they were looked at, and stacks of those that waited were collected
    assert reasons["stalled"] > 0
    assert reasons["world_hangs"] == 0
