"""What a failure was, which one of several was first, and whether training may go on."""

from __future__ import annotations

import re
from collections.abc import Sequence

from keepstep.core.causes import FailureCause
from keepstep.core.events import FirstError, WorkerExited
from keepstep.core.policy import FailureRule, Policy
from keepstep.core.reasons import Reason
from keepstep.core.records import Failure, GenerationRecord, LedgerEntry
from keepstep.core.values import frozen
from keepstep.errors import ExitCode

_EXIT_CODES = {
    FailureCause.HOST_LOST: ExitCode.TOO_FEW_HOSTS,
    FailureCause.LEASE_LOST: ExitCode.TOO_FEW_HOSTS,
    FailureCause.STORE: ExitCode.STORE_REFUSED,
    FailureCause.GPU_FAULT: ExitCode.HARDWARE,
}

_OUT_OF_MEMORY = frozenset({"MemoryError", "ResourceExhaustedError"})
"""Python's own, and TensorFlow's of a device."""

_OF_A_LIBRARY = frozenset({
    "InternalError", "UnknownError", "FailedPreconditionError", "XlaRuntimeError", "JaxRuntimeError",
    "CUDA", "NCCL", "XLA", "TensorFlow",
})  # fmt: skip
_SAYS = (
    (
        FailureCause.OUT_OF_MEMORY,
        re.compile("CUDA_ERROR_OUT_OF_MEMORY|OOM when allocating|Dst tensor is not initialized|RESOURCE_EXHAUSTED"),
    ),
    (
        FailureCause.GPU_FAULT,
        re.compile("CUDA_ERROR_(ECC|NVLINK)_UNCORRECTABLE|uncorrectable ECC error|fallen off the bus", re.IGNORECASE),
    ),
)
"""What CUDA and XLA say through errors of a general kind; a user's own errors are not read so."""

_KILLED = 128 + 9

_AT_ONCE_S = 30.0
"""A script that has run for so long may be in its training, though it reports no steps."""

CLEAN_STOPS = frozenset({42, 143})
"""What TensorFlow's PreemptionCheckpointHandler exits with after it has saved: by itself, and on Google's machines."""

_FREE = "clean stop"
"""The budget that clean stops are charged to: none; but one that comes again and again at one step is a crash loop."""

_OF_THE_PLATFORM = frozenset(
    {FailureCause.AGENT_LOST, FailureCause.HOST_LOST, FailureCause.LEASE_LOST, FailureCause.STORE}
)
"""Causes that say nothing about the script: happening twice at one step, they are no crash loop."""


@frozen
class Verdict:
    """Whether to restart, why, and what it costs.

    Attributes:
        restart: False ends the job with `exit_code`.
        ledger: the failures charged from now on.
        not_before: unix seconds before which the next generation must not start.
        skip: the step whose batch is to be left out; 0 for none.
    """

    restart: bool
    reason: Reason
    ledger: tuple[LedgerEntry, ...]
    not_before: float = 0.0
    exit_code: int = 0
    skip: int = 0


def classify_exit(host: str, rank: int, event: WorkerExited) -> Failure:
    """The failure that an unplanned exit is."""
    error = event.error
    said = None if error is None else _cause_said(error)
    if error is not None and error.victim:
        cause = FailureCause.PEER
    elif event.out_of_memory:
        cause = FailureCause.OUT_OF_MEMORY
    elif said is not None:
        cause = said
    elif event.signal is not None:
        cause = FailureCause.KILLED
    else:
        cause = FailureCause.USER_CODE
    return Failure(
        cause,
        host,
        event.at if error is None else min(error.at, event.at),
        rank if error is None or error.rank < 0 else error.rank,
        max(event.entered, event.completed),
        event.exit_code,
        event.signal,
        "" if error is None else error.error_type,
        "" if error is None else error.message,
        error is not None and error.victim,
    )


def _cause_said(error: FirstError) -> FailureCause | None:
    """The cause that an exception names by itself."""
    if error.error_type in _OUT_OF_MEMORY:
        return FailureCause.OUT_OF_MEMORY
    if error.error_type not in _OF_A_LIBRARY:
        return None
    return next((cause for cause, says in _SAYS if says.search(error.message)), None)


def root_cause(failures: Sequence[Failure]) -> Failure | None:
    """The first failure by time that does not follow from another one; the first of all where each seems to.

    Whatever else fails on a host whose GPU has a fault follows from that.
    """
    if not failures:
        return None
    sick = {each.host for each in failures if each.cause is FailureCause.GPU_FAULT and not each.victim}
    culprits = [
        failure
        for failure in failures
        if not failure.victim and (failure.cause is FailureCause.GPU_FAULT or failure.host not in sick)
    ]
    return min(culprits or failures, key=lambda failure: failure.at)


def exit_code_of(failure: Failure) -> int:
    """The container's exit code where this failure ends the job: the worker's own, 128+signal, or keepstep's."""
    if failure.exit_code:
        return failure.exit_code
    if failure.signal is not None:
        return 128 + failure.signal
    if failure.cause is FailureCause.HANG:  # it had to be killed
        return _KILLED
    return int(_EXIT_CODES.get(failure.cause, ExitCode.BUG))


def judge(policy: Policy, generation: GenerationRecord, root: Failure | None, now: float, passed: int = 0) -> Verdict:
    """Restart or stop, by the first matching rule of the policy and by the budget.

    A restart without a failure is a planned one and costs nothing. A failure before the step `passed`, which is
    committed, costs nothing any more: training went on beyond it.
    """
    ledger = tuple(e for e in generation.ledger if e.at > now - longest_window_s(policy) and e.step >= passed)
    if root is None:
        return Verdict(True, Reason.RESTART_ALLOWED, ledger)
    code = exit_code_of(root)
    rule = policy.rule_for(root.cause, root.exit_code)
    if rule.respond == "exit":
        own = int(_EXIT_CODES.get(root.cause, ExitCode.HARDWARE))
        return Verdict(False, Reason.POLICY_STOPS, ledger, exit_code=own)
    if rule.respond == "stop":
        return Verdict(False, Reason.POLICY_STOPS, ledger, exit_code=code)
    if rule.cause == "any" and _never_began(generation, root):
        return Verdict(False, Reason.NEVER_BEGAN, ledger, exit_code=code)
    same = sum(1 for e in ledger if e.signature == root.signature and e.step == root.step)
    crash_loop = root.cause not in _OF_THE_PLATFORM and same + 1 >= policy.restart.same_step
    skip = root.step if crash_loop and _may_skip(policy, generation, root) else 0
    if crash_loop and not skip:
        return Verdict(False, Reason.SAME_STEP_AGAIN, ledger, exit_code=code)
    clean = is_clean_stop(root) and rule.budget is None
    if not clean and _is_spent(policy, rule, ledger, now):
        return Verdict(False, Reason.BUDGET_SPENT, ledger, exit_code=code)
    if generation.restarts >= policy.restart.ceiling:
        return Verdict(False, Reason.CEILING_REACHED, ledger, exit_code=code)
    wait_s = backoff_s(policy, sum(1 for e in ledger if e.rule != _FREE))
    charged = (*ledger, LedgerEntry(root.at, root.cause, root.signature, root.step, _FREE if clean else rule.own))
    reason = Reason.BATCH_SKIPPED if skip else Reason.RESTART_ALLOWED
    return Verdict(True, reason, charged, root.at if clean else root.at + wait_s, skip=skip)


def _never_began(generation: GenerationRecord, root: Failure) -> bool:
    """Whether the script has failed by itself right after the job's start and before any step: it would do so again.

    A script that reports no steps is in its training after a while.
    """
    is_first = not generation.restarts and generation.resume is None and root.step <= 0
    lived_s = root.at - min(generation.failed_at, default=root.at)
    # beside a lost host or a kill, what the script says may follow from that
    itself = root.cause is FailureCause.USER_CODE and not root.victim
    alone = all(each.victim or each.cause is FailureCause.USER_CODE for each in generation.failures)
    return is_first and itself and alone and lived_s < _AT_ONCE_S and not is_clean_stop(root)


def _may_skip(policy: Policy, generation: GenerationRecord, root: Failure) -> bool:
    """Whether the batch of the step may be what is wrong: an exception in it, and it was not left out already."""
    raised = root.cause is FailureCause.USER_CODE and bool(root.error_type) and root.in_loop
    return raised and policy.restart.bad_batch == "skip" and root.step not in generation.skipped


def longest_window_s(policy: Policy) -> float:
    """Of all budgets, seconds: what lies before it counts for none."""
    own = (rule.budget.window_s for rule in policy.failures if rule.budget)
    return max([policy.restart.budget.window_s, *own])


def is_clean_stop(failure: Failure) -> bool:
    """Whether the script has ended as one does that was told to save and go."""
    return failure.exit_code in CLEAN_STOPS and not failure.error_type


def _is_spent(policy: Policy, rule: FailureRule, ledger: tuple[LedgerEntry, ...], now: float) -> bool:
    """Whether the budget that a failure is charged to has nothing left: its cause's own, or the one for all others."""
    budget = rule.budget or policy.restart.budget
    return sum(1 for e in ledger if e.rule == rule.own and e.at > now - budget.window_s) >= budget.count


def backoff_s(policy: Policy, failures: int) -> float:
    """Seconds to wait after a failure, doubled for each one before it within the window."""
    first_s, max_s = policy.restart.backoff.first, policy.restart.backoff.max
    return min(max_s, first_s * 2.0 ** min(failures, 30))


_HINTS = {
    FailureCause.USER_CODE: "the script ended by itself; its traceback is in that host's log",
    FailureCause.PEER: "every rank says that another one failed first; look for a host or a network that was lost",
    FailureCause.KILLED: "something outside of keepstep ended the process; a crash in native code looks the same",
    FailureCause.OUT_OF_MEMORY: "take a smaller batch, fewer data workers, or an instance with more memory",
    FailureCause.HANG: "the stacks of all ranks are in output/data/keepstep/HOST/stacks",
    FailureCause.GPU_FAULT: "start the job again on another host; a GPU that was repaired is let in again by "
    "`keepstep cordons STORE --lift`",
    FailureCause.HOST_LOST: "start the job again: what is committed is gone on from",
    FailureCause.LEASE_LOST: "start the job again: what is committed is gone on from",
    FailureCause.STORE: "see to the store; nothing that is committed is lost",
}


def hint_for(failure: Failure | None) -> str:
    """What people can do about a failure that ended the job; empty where there is nothing to say."""
    return "" if failure is None else _HINTS.get(failure.cause, "")


def describe(failure: Failure) -> str:
    """One line for people: cause, where, when in training, what it said."""
    where = f"{failure.host} rank {failure.rank}" if failure.rank >= 0 else failure.host
    how = ""
    if failure.signal is not None:
        how = f" by signal {failure.signal}"
    elif failure.exit_code is not None:
        how = f" with exit code {failure.exit_code}"
    what = [f"{failure.cause.value} on {where} at step {failure.step}{how}", failure.error_type, failure.message]
    return ": ".join(filter(None, what))
