"""Jobs whose worlds wait for the preflight: they begin all the same, whoever leads, comes or goes meanwhile."""

from __future__ import annotations

import pytest

from keepstep.core.reasons import Reason
from keepstep.intake.policy import load_policy
from tests.simulation.seeds import POLICY_FILE, play


@pytest.mark.parametrize("respond", ["exclude", "fail"])
@pytest.mark.parametrize("least", ["all", "1"])
def test_worlds_that_wait_for_their_checks_come_to_their_end(respond, least):
    played = play(range(40), load_policy(POLICY_FILE, (f"health.preflight={respond}", f"elastic.hosts.min={least}")))
    assert played.bad == []
    assert played.reasons[Reason.PREFLIGHT_PASSED] and played.reasons[Reason.PREFLIGHT_AWAITED]
