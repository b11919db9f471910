"""What a job is charged with: at which step, what the store is told of it, and when nothing."""

from __future__ import annotations

from keepstep.core.charges import keep
from keepstep.core.events import AgentStarted, CordonsRead, GpusSampled, WorkerExited
from keepstep.core.failures import Charges
from keepstep.core.gpu_events import GpuSample, KeptCordon
from keepstep.core.state import Turn
from keepstep.core.values import evolve
from tests.scenarios.stage import Stage


def test_a_worker_that_dies_before_it_says_where_it_is_has_died_where_it_was_to_go_on_from():
    """Otherwise what is committed would forgive it: such a worker could die for ever."""
    stage = Stage(hosts=1)
    stage.trains("8")
    stage.dies()
    (worker,) = stage.state.workers
    stage.happens(WorkerExited(worker.worker_id, stage.now, exit_code=1))
    assert [entry.step for entry in stage.charges.ledger] == [9, 8]
    assert stage.charges.restarts == 2


def test_a_world_that_never_was_ready_does_not_lessen_what_the_store_knows():
    stage = Stage(hosts=1)
    stage.charges = Charges(3)
    stage.happens(AgentStarted((), ()))
    stage.happens(GpusSampled((GpuSample("GPU-a", 0),)))
    stage.happens(CordonsRead((KeptCordon("GPU-a", "algo-9", "health", "Xid 95", stage.now),)))
    stage.happens(stage._read())
    ended = stage.state.cluster.generation.record
    assert (ended.exit_code, ended.restarts) == (76, 0)
    turn = Turn(evolve(stage.state, exit_code=None), stage.now)
    turn.set_store(charges=Charges(3))  # HEAD came late
    keep(turn)
    assert turn.decision().actions == () and stage.charges == Charges(3)
