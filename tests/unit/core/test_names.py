"""Hosts in the order people count them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.names import in_natural_order, natural_key


@pytest.mark.parametrize(
    ("given_", "wanted"),
    [
        (("algo-10", "algo-2", "algo-1"), ("algo-1", "algo-2", "algo-10")),
        (("b1", "a10", "a9"), ("a9", "a10", "b1")),
        (("node2-10", "node10-1", "node2-9"), ("node2-9", "node2-10", "node10-1")),
        (("a", "10", "9"), ("9", "10", "a")),
        (("²", "1"), ("1", "²")),
        (("x", "x1", ""), ("", "x", "x1")),
        ((), ()),
    ],
)
def test_hosts_are_in_the_order_in_which_people_count(given_, wanted):
    assert in_natural_order(given_) == wanted


@given(st.lists(st.text(alphabet="ab-019", max_size=8), max_size=6))
def test_the_order_does_not_depend_on_how_hosts_came_in(hosts):
    ordered = in_natural_order(tuple(hosts))
    assert sorted(ordered) == sorted(hosts)
    assert [natural_key(host) for host in ordered] == sorted(natural_key(host) for host in hosts)


@given(st.integers(0, 2**31), st.integers(0, 2**31))
def test_the_natural_order_is_that_of_the_numbers(one, other):
    assert (natural_key(f"algo-{one}") < natural_key(f"algo-{other}")) == (one < other)
