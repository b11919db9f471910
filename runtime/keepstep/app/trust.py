"""How the hosts of a job come to trust each other: one authority, which they share through the job's store.

The first host puts it there, the others read it; each makes a certificate of its own with it and forgets its key. At
the end of the job the leader removes it. Whoever meets a certificate that it does not believe, or is not believed,
reads again: the authority may have been replaced.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from keepstep.adapters.certificates import (
    Authority,
    BadAuthority,
    fingerprint_of,
    issue,
    make_authority,
    parse_authority,
    read_files,
    tls_files,
    write_files,
)
from keepstep.adapters.clock import monotonic, sleep, unix_time
from keepstep.adapters.etcd import EtcdCoordinator
from keepstep.adapters.uploader import UploaderClient, UploaderGone
from keepstep.app.members import Members, Site
from keepstep.app.places import TLS_FOLDER
from keepstep.core.state import State
from keepstep.core.values import frozen
from keepstep.errors import ConfigError, ExitCode, QuorumError, StoreRefusedError
from keepstep.ports import TlsFiles

Ask = Callable[[Mapping[str, object]], Awaitable[dict[str, Any]]]

_STORE_S, _STORE_AGAIN_S = 300.0, 2.0
_WRITES_MAX = 10
_LOOK_S, _LOOK_MAX_S = 5.0, 60.0
_FORGET_S = 5.0
_GOES_ON = (ExitCode.BUG, ExitCode.TOO_FEW_HOSTS, ExitCode.HARDWARE, ExitCode.INTERRUPTED)
"""Exits after which the job is tried again, and its hosts may meet some that have not ended."""


class _StoreAway(Exception):
    """The store does not answer now."""


@frozen
class Trust:
    """One node's part in its job's trust.

    Attributes:
        job: the job's name.
        store: where all hosts find the authority.
        folder: where this node's files go.
        places: names and addresses by which others know this node, without those of its interfaces.
        peers: addresses of the hosts that keep etcd: how this node's packets to them are marked is a place, too.
    """

    job: str
    store: str
    folder: Path
    places: tuple[str, ...]
    peers: tuple[str, ...]
    log: Callable[[str], None]

    async def obtain(self, again: bool) -> tuple[TlsFiles, str]:
        """Get a certificate; return the files, and a token that all hosts with this authority have in common.

        Args:
            again: whether an agent before this one may have left the files, with which the member here still runs.

        Raises:
            StoreRefusedError, QuorumError: the store that all are to read is not to be had.
            ConfigError: the scratch folder can not be written.
        """
        known = read_files(self.folder, unix_time()) if again else None
        if known is None:
            until = monotonic() + _STORE_S
            while True:
                try:
                    async with self._line() as ask:
                        authority = await self._settle(ask)
                    break
                except (_StoreAway, UploaderGone, OSError) as error:
                    self.log(f"{self.store}: the hosts' authority can not be read yet: {error}")
                    if monotonic() >= until:
                        raise QuorumError(f"{self.store} does not answer, and the hosts meet through it") from error
                    await sleep(_STORE_AGAIN_S)
            await self._write(authority)
            known = authority.fingerprint
        return tls_files(self.folder), f"{self.job}-{known[:16]}"

    async def keep(self, coordinator: EtcdCoordinator, members: Members) -> None:
        """Read the authority again when certificates are not believed. Never ends."""
        seen, pause_s = coordinator.distrusted, _LOOK_S
        while True:
            await sleep(pause_s)
            if coordinator.distrusted == seen:
                pause_s = _LOOK_S
                continue
            seen, pause_s = coordinator.distrusted, min(2 * pause_s, _LOOK_MAX_S)
            try:
                async with self._line() as ask:
                    renewed = await self._renew(ask)
            except (_StoreAway, StoreRefusedError, ConfigError, UploaderGone, OSError) as error:
                self.log(f"a certificate is not believed, and {self.store} can not be asked: {error}")
                continue
            if renewed:
                self.log("the hosts' authority was replaced; this node has a new certificate")
                coordinator.renew()
                await members.restart()

    async def end(self, state: State, ask: Ask) -> None:
        """Remove the authority, where the job is over and this node speaks for it."""
        leader = state.cluster.leader
        if leader is None or leader.record.node_id != state.job.node_id or state.exit_code in _GOES_ON:
            return
        try:
            async with asyncio.timeout(_FORGET_S):
                found = await _asked(ask, {"command": "trust"})
                own = await asyncio.to_thread(tls_files(self.folder).ca.read_bytes)
                if found["authority"] is None:
                    return
                there = parse_authority(str(found["authority"]), unix_time())
                if there.fingerprint == fingerprint_of(own):
                    await _asked(ask, {"command": "forget", "etag": found["etag"]})
        except (_StoreAway, StoreRefusedError, UploaderGone, BadAuthority, OSError, TimeoutError) as error:
            self.log(f"the hosts' authority stays in the store: {str(error) or 'no answer'}")

    # --- the authority -----------------------------------------------------------------------------------------------

    async def _settle(self, ask: Ask) -> Authority:
        """The one that all hosts will read: what is there, else a new one, if no other host is faster."""
        for _ in range(_WRITES_MAX):
            found = await _asked(ask, {"command": "trust"})
            if found["authority"] is not None:
                try:
                    return parse_authority(str(found["authority"]), unix_time())
                except BadAuthority as error:
                    self.log(f"the hosts' authority in the store is replaced: {error}")
            made = make_authority(self.job, unix_time()).document()
            await _asked(ask, {"command": "entrust", "authority": made, "replaces": found["etag"]})
        raise _StoreAway("it changes all the time")

    async def _renew(self, ask: Ask) -> bool:
        found = await _asked(ask, {"command": "trust"})
        if found["authority"] is None:
            return False
        try:
            authority = parse_authority(str(found["authority"]), unix_time())
        except BadAuthority:
            authority = await self._settle(ask)
        if authority.fingerprint == read_files(self.folder, unix_time()):
            return False
        await self._write(authority)
        return True

    async def _write(self, authority: Authority) -> None:
        places = await asyncio.to_thread(known_places, self.places, self.peers)
        certificate, key = issue(authority, places, unix_time())
        try:
            write_files(self.folder, authority.certificate, certificate, key)
        except OSError as error:
            raise ConfigError(str(error), "a folder that can be written", key="--scratch-dir") from error

    @asynccontextmanager
    async def _line(self) -> AsyncIterator[Ask]:
        """A process that knows the store, for a few questions."""
        client = UploaderClient()
        await client.start()
        try:
            await _asked(client.call, {"command": "open", "store": self.store, "job": self.job})
            yield client.call
        finally:
            await client.stop()


def trust_of(site: Site, store: str, log: Callable[[str], None]) -> Trust:
    """How this node gets its certificate."""
    job = site.job
    places = dict.fromkeys((site.spec(job.host).host, job.host, job.address))
    peers = tuple(site.spec(host).host for host in job.etcd_hosts)
    return Trust(job.name, store, site.scratch.absolute() / TLS_FOLDER, tuple(places), peers, log)


async def _asked(ask: Ask, command: Mapping[str, object]) -> dict[str, Any]:
    reply = await ask(command)
    if reply.get("ok"):
        return reply
    if reply.get("error") in ("refused", "invalid"):
        raise StoreRefusedError(f"the store that hosts meet through: {reply.get('detail')}")
    raise _StoreAway(str(reply.get("detail")))


def known_places(places: Sequence[str], peers: Sequence[str]) -> list[str]:
    """Names and addresses that a node's packets may come from, as far as they can be told now; blocks."""
    found = [*places, "localhost", "127.0.0.1", "::1"]
    for place in places:
        try:
            found += [str(entry[4][0]) for entry in socket.getaddrinfo(place, None, type=socket.SOCK_STREAM)]
        except OSError:
            continue  # whoever checks the name resolves it then
    for peer in peers:
        try:
            family, kind, _, _, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:  # connecting chooses a source address and sends nothing
                probe.connect(address)
                found.append(str(probe.getsockname()[0]))
        except OSError:
            continue
    return [place.partition("%")[0] for place in dict.fromkeys(found)]
