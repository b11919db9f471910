"""A step in which hosts differ is given up once it is known what differs, and not before."""

from __future__ import annotations

import types
from typing import Any

import pytest

from keepstep.core.records import StoredObject, UploadRecord
from keepstep.core.saving import _is_withheld
from keepstep.core.view import Seen

HOSTS = ("algo-1", "algo-2", "algo-3")
OBJECTS = (StoredObject("o", "replicated", 0, 0, 1, "0"),)


def withheld(digests: dict[str, str | None], save_step: int) -> bool:
    """Of three hosts those have said what they uploaded of step 72, or (None) that they have missed it."""
    records = [
        UploadRecord(1, 72, host, digest or "", () if digest is None else OBJECTS) for host, digest in digests.items()
    ]
    cluster = types.SimpleNamespace(uploads={record.key: Seen(record, 1) for record in records})
    turn: Any = types.SimpleNamespace(state=types.SimpleNamespace(cluster=cluster))
    members = [types.SimpleNamespace(host=host) for host in HOSTS]
    generation: Any = types.SimpleNamespace(number=1, members=members, save_step=save_step)
    return _is_withheld(turn, generation, 72)


@pytest.mark.parametrize(
    ("digests", "save_step", "expected"),
    [
        ({"algo-1": "a", "algo-2": "b"}, 72, False),  # the third says who is wrong, and the tensors are compared then
        ({"algo-1": "a", "algo-2": "b", "algo-3": "b"}, 72, False),
        ({"algo-1": "a", "algo-2": "b", "algo-3": "b"}, 0, True),  # compared
        ({"algo-1": "a", "algo-2": "b", "algo-3": None}, 72, True),  # never to be had whole
        ({"algo-1": "a", "algo-2": "a", "algo-3": "a"}, 72, False),
        ({"algo-1": "a", "algo-2": "a", "algo-3": None}, 72, False),
        ({}, 72, False),
    ],
)
def test_a_step_in_which_hosts_differ(digests, save_step, expected):
    assert withheld(digests, save_step) is expected
