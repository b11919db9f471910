"""etcd's own membership: who is a member, and how one is taken in or let go."""

from __future__ import annotations

import asyncio

from keepstep.adapters.etcd.gateway import Endpoints, Gateway, Json, Request
from keepstep.core.values import frozen
from keepstep.ports import CoordinatorRefused, LeaseGone


@frozen
class Member:
    """One member as etcd lists it.

    Attributes:
        member_id: etcd's number of it.
        name: empty where it was taken in and has not started yet.
        peer_urls: where the other members reach it.
        has_started: whether it has ever served.
    """

    member_id: int
    name: str
    peer_urls: tuple[str, ...]
    has_started: bool


class EtcdMembers:
    """Asks and changes etcd's membership; every method raises as the coordinator's methods do.

    A member's number is made of its address and the second: who is let go and taken in again at once is refused once.
    """

    def __init__(self, endpoints: Endpoints, timeout_s: float = 3.0) -> None:
        """Prepare without connecting; `timeout_s` bounds each request, over all endpoints."""
        self._gateway, self._timeout_s = Gateway(endpoints, timeout_s), timeout_s
        self._turn = asyncio.Lock()

    async def found(self) -> list[Member]:
        """Every member, whether it lives or not."""
        answer = await self._ask(Request("/cluster/member/list", {}, repeatable=True))
        return [
            Member(int(raw["ID"]), raw.get("name", ""), tuple(raw.get("peerURLs", ())), bool(raw.get("clientURLs")))
            for raw in answer.get("members", ())
        ]

    async def standing(self) -> tuple[int, int]:
        """The numbers of the member that answers and of the one that it follows, 0 where it knows none."""
        answer = await self._ask(Request("/maintenance/status", {}, repeatable=True))
        return int(answer["header"]["member_id"]), int(answer.get("leader", 0))

    async def hand_over(self, member_id: int) -> None:
        """Have that member lead; to be asked of the one that leads now."""
        await self._ask(Request("/maintenance/transfer-leadership", {"targetID": str(member_id)}, repeatable=False))

    async def add(self, peer_url: str) -> None:
        """Take in a member that will be reached at `peer_url`; it is to be started next."""
        await self._ask(Request("/cluster/member/add", {"peerURLs": [peer_url]}, repeatable=False))

    async def remove(self, member_id: int) -> None:
        """Let a member go; its data is worthless from then on."""
        await self._ask(Request("/cluster/member/remove", {"ID": str(member_id)}, repeatable=False))

    async def close(self) -> None:
        await asyncio.to_thread(self._gateway.close)

    async def _ask(self, request: Request) -> Json:
        async with self._turn:
            until_s = asyncio.get_running_loop().time() + self._timeout_s
            loop = asyncio.get_running_loop()
            try:
                return await asyncio.to_thread(self._gateway.call, request, lambda: until_s - loop.time())
            except LeaseGone as error:  # what etcd says of a member that was let go, too
                raise CoordinatorRefused(str(error)) from error
