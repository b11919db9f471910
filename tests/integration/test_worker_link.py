"""The agent's end of the line to a worker: whatever comes over it, the agent goes on."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from typing import Any

import pytest

from keepstep.adapters.worker_link import WorkerLink
from keepstep_worker.channel import Channel
from tests.support.keepers import KeepsNothing

pytestmark = pytest.mark.integration

NONSENSE = [b"{", b"[1, 2]", b'{"kind": "\xff"}', b"\xff\xfe", b"null", b'"hello"']


async def heard(*packets: bytes | dict[str, Any]) -> list[dict[str, Any]]:
    """What an agent takes in of what a worker sends: bytes as they are, else messages."""
    found: list[dict[str, Any]] = []
    link = WorkerLink(KeepsNothing(), {}, lambda _, message: found.append(message))
    await link.open()
    fds, _, handed_over = link.prepare("algo-1/1")
    with socket.socket(fileno=os.dup(fds[1])) as endpoint:
        for packet in packets:
            if isinstance(packet, bytes):
                endpoint.send(packet)
            else:
                Channel(endpoint).send(packet)
        link.drain()
    handed_over()
    link.hang_up()
    return found


@pytest.mark.parametrize("nonsense", NONSENSE)
def test_what_is_no_message_is_passed_over(nonsense):
    assert asyncio.run(heard(nonsense, b'{"kind": "joined"}')) == [{"kind": "joined"}]


def test_half_a_surrogate_pair_is_not_passed_on():
    message = {"kind": "imported", "file": os.fsdecode(b"/caf\xe9/x.py"), "module": "é\u2028x"}
    (found,) = asyncio.run(heard(message))
    assert found == {**message, "file": "/caf?/x.py"}
    assert json.dumps(found, ensure_ascii=False).encode()
