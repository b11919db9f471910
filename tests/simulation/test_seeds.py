"""Two thousand jobs on hosts that die, freeze and are cut off: none breaks a rule, and each kind of fault fired."""

from __future__ import annotations

import pytest

from keepstep.simulation.faults import FAULTS
from tests.simulation.seeds import play

SEEDS, AT_ONCE = 2_000, 250


@pytest.mark.parametrize("first", range(0, SEEDS, AT_ONCE))
def test_no_seed_breaks_a_rule_and_every_kind_of_fault_fires(first):
    played = play(range(first, first + AT_ONCE))
    assert not played.bad, "\n".join(played.bad)
    assert {fault.name for fault in FAULTS} - set(played.fired) == set()
