"""Every decision's reason is reached by a scenario, and every knob says what it is for."""

from __future__ import annotations

import re

from keepstep.core.reasons import Reason
from tests.house.source import ROOT, tracked


def test_every_reason_is_reached_by_a_scenario():
    scenarios = [path for path in tracked() if path.is_relative_to(ROOT / "tests" / "scenarios")]
    words = {word for path in scenarios for word in re.findall(r"\w+", path.read_text())}
    assert {reason.name for reason in Reason if not {reason.name, str(reason.value)} & words} == set()
