"""What callbacks have changed comes back to them, and to whoever holds the same collections."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import pytest

from keepstep_worker.fit_state import CallbackStates, have_go_on


class Callback:
    """One with an attribute."""

    def __init__(self, kept: Any) -> None:
        self.kept = kept


def changed(callback: Callback, change: Any) -> list[dict[str, Any]]:
    states = CallbackStates([callback])
    change(callback.kept)
    return states.save()[0]


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (list, lambda kept: kept.append(1.5)),
        (dict, lambda kept: kept.update(a=1)),
        (set, lambda kept: kept.add("a")),
        (lambda: deque([1, 2], maxlen=2), lambda kept: kept.append(3)),
        (lambda: defaultdict(list), lambda kept: kept["a"].append(1)),
        (Counter, lambda kept: kept.update("aab")),
        (OrderedDict, lambda kept: kept.update(a=1)),
    ],
)
def test_a_collection_that_the_script_holds_too_stays_one(make, change):
    states = changed(first := Callback(make()), change)
    held = make()
    again = Callback(held)
    CallbackStates([again]).restore(states, pytest.fail)
    assert again.kept is held
    assert held == first.kept


def test_what_is_of_another_kind_by_now_takes_its_place():
    states = changed(Callback([1]), lambda kept: kept.append(2))
    again = Callback((1,))
    CallbackStates([again]).restore(states, pytest.fail)
    assert again.kept == [1, 2]


def test_a_log_in_a_file_is_gone_on_with():
    class CSVLogger:
        append = False

    logger, other = CSVLogger(), Callback(1)
    have_go_on([other, [logger]])
    assert logger.append and not hasattr(other, "append")
    have_go_on(None)
