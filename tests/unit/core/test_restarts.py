"""Which failure was first, what it costs, and when to stop."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.causes import FailureCause
from keepstep.core.events import FirstError, WorkerExited
from keepstep.core.policy import Policy
from keepstep.core.reasons import Reason
from keepstep.core.records import Resume
from keepstep.core.restarts import backoff_s, classify_exit, describe, exit_code_of, judge, root_cause
from tests.unit.core.values import a_failure, a_generation, a_policy, an_entry, failures

NOW = 10_000.0


@given(st.lists(failures, max_size=6))
def test_the_root_cause_is_the_first_culprit_and_a_victim_only_where_all_are(found):
    root = root_cause(found)
    sick = {each.host for each in found if each.cause is FailureCause.GPU_FAULT and not each.victim}
    culprits = [
        failure
        for failure in found
        if not failure.victim and (failure.host not in sick or failure.cause is FailureCause.GPU_FAULT)
    ]
    assert (root is None) == (not found)
    if root is not None:
        assert root in (culprits or found)
        assert root.at == min(failure.at for failure in culprits or found)


def test_a_victim_that_was_seen_first_is_not_to_blame():
    victim, culprit = a_failure(1.0, FailureCause.PEER, victim=True), a_failure(2.0)
    assert root_cause([victim, culprit]) == culprit


def test_what_else_fails_on_a_host_whose_gpu_has_a_fault_follows_from_that():
    died, fault = a_failure(1.0, FailureCause.KILLED), a_failure(2.0, FailureCause.GPU_FAULT)
    assert root_cause([died, fault]) == fault
    elsewhere = a_failure(1.5, FailureCause.KILLED, host="algo-2")
    assert root_cause([died, fault, elsewhere]) == elsewhere


@pytest.mark.parametrize(
    ("event", "cause"),
    [
        (WorkerExited("w", 5.0, exit_code=1), FailureCause.USER_CODE),
        (WorkerExited("w", 5.0, signal=9), FailureCause.KILLED),
        (WorkerExited("w", 5.0, signal=9, out_of_memory=True), FailureCause.OUT_OF_MEMORY),
        (
            WorkerExited("w", 5.0, exit_code=1, error=FirstError("UnavailableError", "", 4.0, 3, True)),
            FailureCause.PEER,
        ),
        (
            WorkerExited("w", 5.0, exit_code=1, error=FirstError("ValueError", "", 4.0, 3, False)),
            FailureCause.USER_CODE,
        ),
        (
            WorkerExited("w", 5.0, exit_code=1, error=FirstError("ResourceExhaustedError", "", 4.0, 3, False)),
            FailureCause.OUT_OF_MEMORY,
        ),
        (
            WorkerExited(
                "w", 5.0, signal=9, out_of_memory=True, error=FirstError("UnavailableError", "", 4.0, 3, True)
            ),
            FailureCause.PEER,
        ),
    ],
)
def test_an_exit_is_classified(event, cause):
    assert classify_exit("algo-1", 0, event).cause is cause


ECC = "failed to synchronize: CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error encountered"


@pytest.mark.parametrize(
    ("error_type", "message", "cause"),
    [
        ("InternalError", ECC, FailureCause.GPU_FAULT),
        ("XlaRuntimeError", "INTERNAL: CUDA_ERROR_NVLINK_UNCORRECTABLE", FailureCause.GPU_FAULT),
        ("UnknownError", "Unable to determine the device handle: GPU has fallen off the bus", FailureCause.GPU_FAULT),
        ("InternalError", "Dst tensor is not initialized.", FailureCause.OUT_OF_MEMORY),
        ("InternalError", "failed to alloc: CUDA_ERROR_OUT_OF_MEMORY: out of memory", FailureCause.OUT_OF_MEMORY),
        ("XlaRuntimeError", "RESOURCE_EXHAUSTED: Out of memory while trying", FailureCause.OUT_OF_MEMORY),
        ("InternalError", "CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access", FailureCause.USER_CODE),
        ("ValueError", ECC, FailureCause.USER_CODE),
        ("MemoryError", "", FailureCause.OUT_OF_MEMORY),
    ],
)
def test_what_libraries_say_of_a_cause_is_believed(error_type, message, cause):
    error = FirstError(error_type, message, 4.0, 3, False)
    assert classify_exit("algo-1", 0, WorkerExited("w", 5.0, exit_code=1, error=error)).cause is cause


def test_a_failure_is_dated_by_the_exception_where_there_is_one():
    event = WorkerExited(
        "w", 5.0, exit_code=1, error=FirstError("ValueError", "bad", 4.0, 3, False), entered=8, completed=7
    )
    failure = classify_exit("algo-1", 2, event)
    assert (failure.at, failure.step, failure.rank, failure.error_type) == (4.0, 8, 2, "ValueError")


@pytest.mark.parametrize(("said", "wanted"), [(5, 5), (-1, 2)])
def test_a_host_with_several_ranks_says_which_one_failed(said, wanted):
    error = FirstError("ValueError", "bad", 4.0, 3, False, rank=said)
    assert classify_exit("algo-1", 2, WorkerExited("w", 5.0, exit_code=1, error=error)).rank == wanted


@pytest.mark.parametrize(
    ("library", "message", "cause"),
    [
        ("CUDA", ECC, FailureCause.GPU_FAULT),
        ("TensorFlow", "could not synchronize: CUDA_ERROR_OUT_OF_MEMORY", FailureCause.OUT_OF_MEMORY),
        ("TensorFlow", "Check failed: a == b (1 vs. 2)", FailureCause.KILLED),
        ("", "", FailureCause.KILLED),
    ],
)
def test_what_a_library_printed_before_it_ended_the_process_is_believed(library, message, cause):
    error = FirstError(library, message, 4.0, 3, False)
    assert classify_exit("algo-1", 0, WorkerExited("w", 5.0, signal=6, error=error)).cause is cause


def test_a_planned_restart_costs_nothing():
    ledger = (an_entry(a_failure(NOW - 5.0)),)
    verdict = judge(a_policy(budget="1 per 1h", ceiling=0), a_generation(ledger=ledger), None, NOW)
    assert (verdict.restart, verdict.ledger, verdict.not_before) == (True, ledger, 0.0)


def test_a_failure_is_charged_once():
    failure = a_failure(NOW - 1.0)
    verdict = judge(Policy(), a_generation(), failure, NOW)
    assert (verdict.restart, verdict.ledger) == (True, (an_entry(failure),))


def test_what_lies_outside_the_window_is_forgiven():
    ledger = tuple(an_entry(a_failure(at, message=str(at))) for at in (NOW - 3700.0, NOW - 3601.0, NOW - 10.0))
    verdict = judge(a_policy(budget="2 per 1h"), a_generation(ledger=ledger), a_failure(NOW), NOW)
    assert verdict.restart
    assert [entry.at for entry in verdict.ledger] == [NOW - 10.0, NOW]


def test_the_budget_stops_with_the_workers_own_code():
    ledger = tuple(an_entry(a_failure(NOW - wait, message=str(wait))) for wait in (3.0, 2.0))
    verdict = judge(a_policy(budget="2 per 1h"), a_generation(ledger=ledger), a_failure(NOW, exit_code=17), NOW)
    assert (verdict.restart, verdict.reason, verdict.exit_code) == (False, Reason.BUDGET_SPENT, 17)


@pytest.mark.parametrize("code", [42, 143])
def test_a_script_that_saved_and_went_costs_nothing(code):
    """As TensorFlow's PreemptionCheckpointHandler does; unless it goes again and again at one step."""
    policy, ledger = a_policy(budget="1 per 1h", same_step=3), (an_entry(a_failure(NOW - 1.0)),)
    for step in range(5, 15):
        verdict = judge(
            policy, a_generation(ledger=ledger), a_failure(NOW, exit_code=code, error_type="", step=step), NOW
        )
        assert (verdict.restart, verdict.not_before) == (True, NOW)
        ledger = verdict.ledger
    assert not judge(policy, a_generation(ledger=ledger), a_failure(NOW, exit_code=1, step=20), NOW).restart
    raised = a_failure(NOW, exit_code=code, step=20)
    assert not judge(policy, a_generation(ledger=ledger), raised, NOW).restart
    again = a_failure(NOW, exit_code=code, error_type="", step=20)
    for restarts in (True, True, False):
        verdict = judge(policy, a_generation(ledger=ledger), again, NOW)
        assert verdict.restart == restarts
        ledger = verdict.ledger


def test_a_batch_is_left_out_once_and_only_where_the_script_raised():
    policy = a_policy(same_step=2, bad_batch="skip")

    def judged(skipped=(), in_loop=True, **changes):
        failure = a_failure(NOW, in_loop=in_loop, **changes)
        ledger = (an_entry(failure),)
        return judge(policy, a_generation(ledger=ledger, skipped=skipped), failure, NOW)

    verdict = judged()
    assert (verdict.restart, verdict.reason, verdict.skip) == (True, Reason.BATCH_SKIPPED, 7)
    assert len(verdict.ledger) == 2
    for refused in (
        judged(skipped=(7,)),
        judged(error_type=""),
        judged(in_loop=False),
        judged(cause=FailureCause.KILLED),
    ):
        assert (refused.restart, refused.reason, refused.skip) == (False, Reason.SAME_STEP_AGAIN, 0)
    assert judge(a_policy(bad_batch="skip"), a_generation(), a_failure(NOW, in_loop=True), NOW).skip == 0


def test_what_lies_before_a_committed_step_is_forgiven():
    """Training went on past it; a failure at that very step did not let it."""
    ledger = tuple(an_entry(a_failure(NOW - wait, step=step)) for wait, step in ((3.0, 7), (2.0, 8), (1.0, 9)))
    verdict = judge(a_policy(budget="3 per 1h"), a_generation(ledger=ledger), a_failure(NOW, step=11), NOW, 8)
    assert verdict.restart
    assert [entry.step for entry in verdict.ledger] == [8, 9, 11]
    assert not judge(a_policy(budget="3 per 1h"), a_generation(ledger=ledger), a_failure(NOW, step=11), NOW, 7).restart


def with_budgets(**budgets: str) -> Policy:
    rules = [{"cause": cause, "respond": "restart", "budget": budget} for cause, budget in budgets.items()]
    return Policy.model_validate({"restart": {"budget": "2 per 1h"}, "failures": rules})


@pytest.mark.parametrize(
    ("causes", "next_one", "restarts"),
    [
        (["hang", "killed", "killed"], "hang", False),
        (["killed", "killed"], "hang", True),
        (["killed", "killed"], "user_code", False),
        (["hang", "killed"], "user_code", True),
        (["hang", "user_code"], "killed", True),
    ],
)
def test_a_cause_may_have_a_budget_of_its_own(causes, next_one, restarts):
    """Which is not charged to the one for all the others."""
    policy, ledger = with_budgets(hang="1 per 6h"), ()
    for number, cause in enumerate(causes):
        failure = a_failure(NOW - 90.0 + number, FailureCause(cause), message=str(number))
        ledger = judge(policy, a_generation(ledger=ledger), failure, NOW).ledger
    assert len(ledger) == len(causes)
    verdict = judge(policy, a_generation(ledger=ledger), a_failure(NOW, FailureCause(next_one)), NOW)
    assert (verdict.restart, verdict.reason is Reason.BUDGET_SPENT) == (restarts, not restarts)


def test_each_rule_has_a_budget_of_its_own():
    """Two of one cause are told apart by the exit code that one of them names."""
    rules = [
        {"cause": "user_code", "exit_code": 42, "respond": "restart", "budget": "20 per 1h"},
        {"cause": "user_code", "respond": "restart", "budget": "1 per 1h"},
    ]
    policy, ledger = Policy.model_validate({"failures": rules}), ()
    for number in range(3):
        failure = a_failure(NOW - 90.0 + number, exit_code=42, message=str(number))
        ledger = judge(policy, a_generation(ledger=ledger), failure, NOW).ledger
    first = judge(policy, a_generation(ledger=ledger), a_failure(NOW - 9.0, exit_code=1, message="other"), NOW)
    assert first.restart
    second = judge(policy, a_generation(ledger=first.ledger), a_failure(NOW, exit_code=1, message="third"), NOW)
    assert (second.restart, second.reason) == (False, Reason.BUDGET_SPENT)


def test_a_window_of_its_own_is_remembered_as_long_as_it_lasts():
    policy = with_budgets(hang="1 per 6h")
    old = judge(policy, a_generation(), a_failure(NOW - 20_000.0, FailureCause.HANG), NOW).ledger
    assert not judge(policy, a_generation(ledger=old), a_failure(NOW, FailureCause.HANG), NOW).restart
    assert judge(policy, a_generation(ledger=old), a_failure(NOW + 2000.0, FailureCause.HANG), NOW + 2000.0).restart


def test_the_ceiling_counts_all_restarts_of_the_job():
    verdict = judge(a_policy(ceiling=4), a_generation(restarts=4), a_failure(NOW), NOW)
    assert (verdict.restart, verdict.reason) == (False, Reason.CEILING_REACHED)
    assert judge(a_policy(ceiling=5), a_generation(restarts=4), a_failure(NOW), NOW).restart


@pytest.mark.parametrize(
    ("change", "generation", "rules", "stops"),
    [
        ({}, {}, (), True),
        ({"error_type": "", "message": ""}, {}, (), True),
        ({"cause": FailureCause.KILLED, "signal": 9, "exit_code": None}, {}, (), False),
        ({"step": 1}, {}, (), False),
        ({"exit_code": 42, "error_type": ""}, {}, (), False),
        ({}, {"restarts": 1}, (), False),
        ({}, {"resume": Resume(4, "d")}, (), False),
        ({}, {"failed_at": (NOW - 31.0,)}, (), False),
        ({}, {"failures": (a_failure(NOW, FailureCause.PEER, victim=True),)}, (), True),
        ({}, {"failures": (a_failure(NOW + 1.0, FailureCause.HOST_LOST),)}, (), False),
        ({"cause": FailureCause.PEER, "victim": True}, {}, (), False),
        ({}, {}, ({"cause": "user_code", "respond": "restart"},), False),
    ],
)
def test_a_script_that_fails_before_any_step_right_after_the_start_ends_the_job(change, generation, rules, stops):
    policy = Policy.model_validate({"failures": [*rules, {"cause": "any", "respond": "restart"}]})
    record = a_generation(**{"failed_at": (NOW - 5.0,), **generation})
    verdict = judge(policy, record, a_failure(NOW, **{"step": 0, **change}), NOW)
    assert (verdict.reason is Reason.NEVER_BEGAN) == stops


@pytest.mark.parametrize(
    ("change", "stops"),
    [({}, True), ({"step": 8}, False), ({"error_type": "KeyError"}, False), ({"message": "other"}, False)],
)
def test_the_same_error_at_the_same_step_is_a_crash_loop(change, stops):
    ledger = tuple(an_entry(a_failure(NOW - wait)) for wait in (3.0, 2.0))
    verdict = judge(a_policy(same_step=3), a_generation(ledger=ledger), a_failure(NOW, **change), NOW)
    assert (verdict.reason is Reason.SAME_STEP_AGAIN) == stops


@pytest.mark.parametrize("cause", [FailureCause.HOST_LOST, FailureCause.AGENT_LOST, FailureCause.LEASE_LOST])
def test_what_the_platform_does_twice_at_one_step_is_no_crash_loop(cause):
    failure = a_failure(NOW, cause, exit_code=None, error_type="", message="")
    ledger = (an_entry(failure),) * 5
    assert judge(a_policy(same_step=2), a_generation(ledger=ledger), failure, NOW).restart


def test_the_policys_response_comes_before_the_budget():
    gpu = judge(Policy(), a_generation(), a_failure(NOW, FailureCause.GPU_FAULT, exit_code=None), NOW)
    memory = judge(Policy(), a_generation(), a_failure(NOW, FailureCause.OUT_OF_MEMORY, exit_code=None, signal=9), NOW)
    assert (gpu.restart, gpu.reason, gpu.exit_code) == (False, Reason.POLICY_STOPS, 76)
    assert (memory.restart, memory.reason, memory.exit_code) == (False, Reason.POLICY_STOPS, 137)


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (a_failure(exit_code=3), 3),
        (a_failure(exit_code=None, signal=11), 139),
        (a_failure(cause=FailureCause.HOST_LOST, exit_code=None), 75),
        (a_failure(cause=FailureCause.LEASE_LOST, exit_code=None), 75),
        (a_failure(cause=FailureCause.GPU_FAULT, exit_code=None), 76),
        (a_failure(cause=FailureCause.STORE, exit_code=None), 77),
        (a_failure(cause=FailureCause.AGENT_LOST, exit_code=None), 70),
        (a_failure(exit_code=0, signal=None), 70),
    ],
)
def test_the_exit_code_says_who_must_act(failure, code):
    assert exit_code_of(failure) == code


@given(st.floats(0, 600), st.floats(0, 600), st.integers(0, 10_000))
def test_backoff_doubles_up_to_its_limit(first, more, before):
    backoff = {"first": f"{first:.3f}s", "max": f"{first + more + 0.001:.3f}s"}
    policy = a_policy(backoff=backoff)
    wait_s = backoff_s(policy, before)
    limit_s = policy.restart.backoff.max
    assert 0.0 <= wait_s <= limit_s
    assert backoff_s(policy, before + 1) in (pytest.approx(2 * wait_s), limit_s, 0.0)
    assert backoff_s(policy, 0) == policy.restart.backoff.first


def test_the_wait_counts_from_the_failure():
    policy = a_policy(backoff={"first": "2s", "max": "60s"})
    ledger = (an_entry(a_failure(NOW - 100.0, message="other")),)
    assert judge(policy, a_generation(ledger=ledger), a_failure(NOW - 1.0), NOW).not_before == NOW - 1.0 + 4.0


@given(st.lists(failures, min_size=1, max_size=12))
def test_a_verdict_never_charges_more_than_one_failure(found):
    generation = a_generation(ledger=tuple(an_entry(failure) for failure in found[1:]))
    verdict = judge(Policy(), generation, found[0], NOW)
    assert len(verdict.ledger) <= len(generation.ledger) + verdict.restart
    assert verdict.restart or verdict.exit_code


def test_a_failure_is_told_in_one_line():
    told = describe(a_failure(exit_code=1))
    assert told == "user_code on algo-1 rank 0 at step 7 with exit code 1: ValueError: bad"
    killed = replace(a_failure(exit_code=None, signal=9), error_type="", message="")
    assert describe(killed).endswith("at step 7 by signal 9")
    lost = a_failure(cause=FailureCause.HOST_LOST, rank=-1, exit_code=None, error_type="")
    assert describe(replace(lost, message="")) == "host_lost on algo-1 at step 7"
    assert describe(replace(lost, message="gone")) == "host_lost on algo-1 at step 7: gone"
