"""Processes that serve those that train: parameter servers, the workers that a chief gives work to, tf.data's service.

All state is on the parameter servers and with the chief: if one of these is lost, the world starts anew, from the files
that the script has written. A worker holds nothing: it is replaced at its own address, within the generation. So are
the parts of tf.data's service, on hosts that are no members of it.
"""

from __future__ import annotations

from keepstep.core.actions import StartServer, StopWorker
from keepstep.core.events import WorkerExited
from keepstep.core.facts import Recovery, Replacement, Server
from keepstep.core.launch import plan_feeder, plan_server, servers_of
from keepstep.core.launch.data_service import DISPATCHER, FEEDER, tasks_of
from keepstep.core.membership import is_registered
from keepstep.core.reasons import Reason
from keepstep.core.records import Failure, GenerationRecord, Phase
from keepstep.core.restarts import backoff_s, classify_exit, longest_window_s
from keepstep.core.state import Turn
from keepstep.core.values import evolve
from keepstep.core.view import table_of


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
    if generation is None or generation.phase is not Phase.READY or not serves(turn) or not is_registered(turn):
        return
    failed = turn.is_member and state.failure is not None and state.failure_generation == generation.number
    if (
        failed
        or state.done == generation.number
        or (turn.is_member and (turn.interrupted or generation.pause))
        or any(server.stopping for server in state.servers)
    ):
        return
    rank, position = generation.rank_of(state.job.host), generation.feeds(state.job.host)
    for task in servers_of(state.job, rank) if turn.is_member else tasks_of(position):
        lives = [s for s in state.servers if (s.generation, s.role, s.number) == (generation.number, *task)]
        if not lives and (task.role == "ps" or _is_due(turn, generation)):
            server = Server(f"{state.job.node_id}.s{turn.state.serves}", generation.number, rank, *task)
            kept = tuple(each for each in turn.state.servers if each.generation == generation.number)
            turn.set(servers=(*kept, server), serves=turn.state.serves + 1)
            table = table_of(generation, len(generation.members))
            plan = plan_server(state.job, table, task) if rank >= 0 else plan_feeder(state.job, table, task, position)
            title = f"{task.role} {task.number}"
            turn.do(
                StartServer(server.server_id, title, *plan),
                Reason.SERVER_STARTS,
                f"{title} of generation {generation.number}",
            )


def serves(turn: Turn) -> bool:
    """Whether this host may run anything in the generation at hand."""
    generation = turn.generation
    return generation is not None and (turn.is_member or generation.feeds(turn.state.job.host) >= 0)


def _is_due(turn: Turn, generation: GenerationRecord) -> bool:
    """Whether the next replacement may be made now; wakes the node where it may not."""
    since = turn.now - turn.state.policy.restart.budget.window_s
    here = [each.at for each in turn.state.replaced if each.generation == generation.number and each.at > since]
    due_at = here[-1] + backoff_s(turn.state.policy, len(here) - 1) if here else turn.now
    if turn.now < due_at:
        turn.wake(due_at)
    return turn.now >= due_at


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
    elif event.exit_code == 0:  # should the chief miss it, the chief says so
        turn.set(servers=(*others, evolve(server, ended=True)))
        turn.because(Reason.WORKER_DONE, title)
    elif turn.state.done == server.generation:  # the chief here needs nobody any more
        turn.set(servers=others)
        turn.because(Reason.WORKER_STOPPED, title)
    else:
        turn.set(servers=others)
        # of the training's progress it knows nothing: no two of its failures are the same one again
        _fails(turn, server, evolve(classify_exit(turn.state.job.host, server.rank, event), files=server.generation))
    return True


def _fails(turn: Turn, server: Server, failure: Failure) -> None:
    """A worker is replaced, as often as the policy restarts from such a failure; without others no world goes on."""
    why = f"{server.role} {server.number}: {failure.cause.value} {failure.error_type}".strip()
    policy = turn.state.policy
    rule = policy.rule_for(failure.cause, failure.exit_code)
    budget = rule.budget or policy.restart.budget
    kept = tuple(each for each in turn.state.replaced if each.at > turn.now - longest_window_s(policy))
    recent = (each for each in kept if each.rule == rule.own and each.at > turn.now - budget.window_s)
    spent = sum(1 for _ in recent) >= budget.count
    feeds = server.role in (DISPATCHER, FEEDER)  # without it nothing is lost, and nobody here could end the world
    if feeds or (server.role in ("worker", "evaluator") and rule.respond == "restart" and not spent):
        turn.set(replaced=(*kept, Replacement(server.generation, turn.now, rule.own)))
        turn.because(Reason.SERVER_REPLACED, why)
        return
    turn.set(failure=failure, failure_generation=server.generation)
    if turn.state.recovery is None:
        turn.set(recovery=Recovery(fault_at=failure.at, learnt_at=turn.now))
    turn.because(Reason.WORKER_FAILED, why)


def _set(turn: Turn, server_id: str, **changes: bool) -> None:
    turn.set(servers=tuple(evolve(s, **changes) if s.server_id == server_id else s for s in turn.state.servers))
