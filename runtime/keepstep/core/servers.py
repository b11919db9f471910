"""Processes that serve the job's chief: parameter servers, and the workers that it gives work to.

All state is on the parameter servers and with the chief: if one of these is lost, the world starts anew, from the files
that the script has written. A worker holds nothing: it is replaced at its own address, within the generation.
"""

from __future__ import annotations

from keepstep.core.actions import StartServer, StopWorker
from keepstep.core.events import WorkerExited
from keepstep.core.facts import Recovery, Server
from keepstep.core.launch import plan_server, servers_of
from keepstep.core.membership import is_registered
from keepstep.core.reasons import Reason
from keepstep.core.records import Failure, GenerationRecord, Phase
from keepstep.core.restarts import backoff_s, classify_exit
from keepstep.core.state import Turn
from keepstep.core.values import evolve
from keepstep.core.view import addresses_of


def stop_older(turn: Turn, generation: GenerationRecord | None) -> None:
    """Stop every server that belongs to another generation than `generation`, which is None where none may run."""
    for server in turn.state.servers:
        if server.ended or server.stopping or (generation is not None and server.generation == generation.number):
            continue
        turn.do(StopWorker(server.server_id), Reason.OLDER_WORKERS_STOP, f"generation {server.generation}")
        _set(turn, server.server_id, stopping=True)


def start(turn: Turn) -> None:
    """Start what this host is to serve with in a ready generation, and what is missing of it again."""
    state, generation = turn.state, turn.generation
    if generation is None or generation.phase is not Phase.READY or not turn.is_member or not is_registered(turn):
        return
    failed = state.failure is not None and state.failure_generation == generation.number
    if turn.interrupted or generation.pause or failed or any(server.stopping for server in state.servers):
        return
    rank = generation.rank_of(state.job.host)
    for task in servers_of(state.job, rank):
        lives = [s for s in state.servers if (s.generation, s.role, s.number) == (generation.number, *task)]
        if not lives and _is_due(turn):
            server = Server(f"{state.job.node_id}.s{turn.state.serves}", generation.number, rank, *task)
            kept = tuple(each for each in turn.state.servers if each.generation == generation.number)
            turn.set(servers=(*kept, server), serves=turn.state.serves + 1)
            plan = plan_server(state.job, generation.number, addresses_of(generation), task, state.policy)
            title = f"{task.role} {task.number}"
            turn.do(
                StartServer(server.server_id, title, *plan),
                Reason.SERVER_STARTS,
                f"{title} of generation {generation.number}",
            )


def _is_due(turn: Turn) -> bool:
    """Whether the next replacement may be made now; wakes the node where it may not."""
    replaced = _recent(turn)
    due_at = replaced[-1] + backoff_s(turn.state.policy, len(replaced) - 1) if replaced else turn.now
    if turn.now < due_at:
        turn.wake(due_at)
    return turn.now >= due_at


def _recent(turn: Turn) -> tuple[float, ...]:
    window_s = turn.state.policy.restart.budget.window_s
    return tuple(at for at in turn.state.replaced if at > turn.now - window_s)


def on_exited(turn: Turn, event: WorkerExited) -> bool:
    """A process is gone; False where it was none of the servers."""
    server = next((each for each in turn.state.servers if each.server_id == event.worker_id), None)
    if server is None:
        return False
    others = tuple(each for each in turn.state.servers if each is not server)
    title = f"{server.role} {server.number}"
    if server.stopping:
        turn.set(servers=others)
        turn.because(Reason.WORKER_STOPPED, event.worker_id)
    elif event.exit_code == 0:
        turn.set(servers=(*others, evolve(server, ended=True)))
        turn.because(Reason.WORKER_DONE, title)
    else:
        turn.set(servers=others)
        failure = classify_exit(turn.state.job.host, server.rank, event)
        why = f"{title}: {failure.cause.value} {failure.error_type}".strip()
        replaced = _recent(turn)
        if server.role == "worker" and len(replaced) < turn.state.policy.restart.budget.count:
            turn.set(replaced=(*replaced, turn.now))
            turn.because(Reason.SERVER_REPLACED, why)
        else:
            _fail(turn, server, failure, why)
    return True


def _fail(turn: Turn, server: Server, failure: Failure, why: str) -> None:
    """The world can not go on without it."""
    turn.set(failure=failure, failure_generation=server.generation)
    if turn.state.recovery is None:
        turn.set(recovery=Recovery(fault_at=failure.at, learnt_at=turn.now))
    turn.because(Reason.WORKER_FAILED, why)


def _set(turn: Turn, server_id: str, **changes: bool) -> None:
    turn.set(servers=tuple(evolve(s, **changes) if s.server_id == server_id else s for s in turn.state.servers))
