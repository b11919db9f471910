"""This node's part in the job's etcd: where it is, and the member that runs on this host, if one does.

A member that was here before and has lost its data must not begin anew beside the others: what it had voted for is
forgotten. So it asks the others first, and where they know it, it leaves by etcd's own membership change and comes
back.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from keepstep.adapters.clock import monotonic, sleep
from keepstep.adapters.etcd import Endpoints, EtcdCoordinator, EtcdMembers
from keepstep.adapters.etcd_member import (
    DATA_PREFIX,
    EtcdMissing,
    MemberCommand,
    MemberSpec,
    choose_data_dir,
    discard_data_dir,
    find_etcd,
    note_data_dir,
    noted_data_dir,
    plan_member,
)
from keepstep.adapters.init_link import InitLink
from keepstep.app.operating import FILE, write_entry
from keepstep.core.job import JobSpec
from keepstep.core.values import frozen
from keepstep.errors import ConfigError, QuorumError
from keepstep.ports import CoordinatorRefused, CoordinatorUnavailable, TlsFiles

_NAME_S, _NAME_TOLD_S = 900.0, 10.0
_ASK_S, _JOIN_S, _JOIN_AGAIN_S, _SERVES_AGAIN_S = 1.0, 30.0, 1.0, 0.2
_WRITES_END_S = 5.5  # etcd gives a message to another member 5 s to be written, and closes the connection then
_NOTHING = "/keepstep/.nothing/"
_DEATHS_MAX, _DEATHS_WITHIN_S, _REST_S = 5, 120.0, 0.5


@frozen
class Site:
    """Where the job's hosts keep etcd.

    Attributes:
        port: client port; the next one is for the members among themselves.
        places: address and client port of hosts that have them of their own, as several on one machine must.
        scratch: folder of this host for what need not outlive the container.
        search_path: where etcd's program is looked for, in PATH's syntax.
        endpoints: URLs of an etcd that is there already; empty where the job keeps its own.
        tls: what this node proves itself with; None: plain HTTP.
        token: equal for all hosts of this attempt of the job.
    """

    job: JobSpec
    port: int
    places: Mapping[str, tuple[str, int]]
    scratch: Path
    search_path: str | None
    endpoints: tuple[str, ...] = ()
    tls: TlsFiles | None = None
    token: str = ""

    def urls(self, hosts: Sequence[str]) -> tuple[str, ...]:
        """Client URLs of the members on these hosts."""
        return self.endpoints or tuple(self.spec(host).client_url for host in hosts)

    def spec(self, host: str, **more: object) -> MemberSpec:
        """A member on that host, as far as all hosts know of it."""
        address, port = self.places.get(host, (host, self.port))
        token = self.token or self.job.name
        values = {"data_dir": self.scratch, "log_path": self.scratch / "etcd.log", "token": token, **more}
        return MemberSpec(host, address, port, port + 1, tls=self.tls, **values)  # type: ignore[arg-type]


class Members:
    """Starts, keeps and joins the member of this host; tells the coordinator where to ask."""

    def __init__(self, site: Site, coordinator: EtcdCoordinator, init: InitLink, log: Callable[[str], None]) -> None:
        self._site, self._coordinator, self._init, self._log = site, coordinator, init, log
        self._command: MemberCommand | None = None
        self._deaths: list[float] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start the member of this host where it is to have one from the beginning, and does not run already.

        Raises:
            ConfigError: the scratch folder can not be used.
            QuorumError: there is no etcd to start, or this host's name does not resolve.
        """
        job = self._site.job
        try:
            self._site.scratch.mkdir(parents=True, exist_ok=True)
            self._write_entry(job.etcd_hosts)
        except OSError as error:
            raise ConfigError(str(error), "a folder that can be written", key="--scratch-dir") from error
        known = noted_data_dir(self._site.scratch) if job.boot else None
        if known is not None and known.is_dir():  # an agent before this one had it started, or it runs still
            await self._run(self._plan(known, joins=not job.keeps_etcd))  # which counts where it has no data yet
            return
        if not job.keeps_etcd:
            return
        self._find_binary()  # to fail at once, and not after a wait for a name
        await self._wait_for_own_name()
        others = [host for host in job.etcd_hosts if host != job.host]
        joins = await self._was_here(others) if others else False
        if joins is None:
            self._log("another host keeps etcd in this one's place")
            return
        if not joins or await self._rejoin(others, job.host):
            await self._run(self._plan(self._new_data_dir(), joins=joins, hosts=job.etcd_hosts))

    def use(self, hosts: Sequence[str]) -> None:
        """Ask the members on these hosts from now on."""
        self._coordinator.use(self._site.urls(hosts))
        try:
            self._write_entry(hosts)
        except OSError as error:
            self._log(f"{FILE} can not be written: {error}")

    async def join(self, leaving: str, hosts: Sequence[str]) -> str:
        """Start a member here in the place of a lost one; return what went wrong, empty where nothing did.

        It counts as joined once it serves: until then the others can not do without one of theirs.
        """
        if self._command is None:
            others = [host for host in hosts if host != self._site.job.host]
            if not await self._rejoin(others, leaving):
                return "the others do not take it in"
            try:
                await self._run(self._plan(self._new_data_dir(), joins=True, hosts=hosts))
            except (OSError, QuorumError, ConfigError) as error:
                return str(error)
        return "" if await self._serves() else "its member does not catch up with the others"

    def exited(self, status: int) -> None:
        """The member of this host died by itself; start it again on its data, unless it does so time and again."""
        now = monotonic()
        self._deaths = [at for at in self._deaths if at > now - _DEATHS_WITHIN_S] + [now]
        if self._command is None or len(self._deaths) > _DEATHS_MAX:
            self._log(f"etcd ended with {status}; it stays away")
            self._command = None
            return
        self._log(f"etcd ended with {status}; starting it again")
        task = asyncio.get_running_loop().create_task(self._again(self._command))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def restart(self) -> None:
        """Have the member of this host start again, with the certificates that are there now."""
        if self._command is not None:
            await self._init.stop_companion("etcd")

    async def _again(self, command: MemberCommand) -> None:
        await sleep(_REST_S)
        await self._run(command)

    async def _run(self, command: MemberCommand) -> None:
        self._command = command
        self._log(f"etcd on {command.endpoint}")
        await self._init.companion("etcd", command.argv, command.env, str(command.log_path))

    # --- what to start -----------------------------------------------------------------------------------------------

    def _plan(self, data_dir: Path, joins: bool, hosts: Sequence[str] = ()) -> MemberCommand:
        site, binary = self._site, self._find_binary()
        hosts = hosts or site.job.etcd_hosts
        others = tuple((host, site.spec(host).peer_url) for host in hosts if host != site.job.host)
        more = {"token": uuid.uuid4().hex} if not others else {}  # alone, each new one is another etcd
        return plan_member(binary, site.spec(site.job.host, data_dir=data_dir, others=others, joins=joins, **more))

    def _find_binary(self) -> Path:
        try:
            return find_etcd(self._site.search_path)
        except EtcdMissing as error:
            raise QuorumError(str(error)) from error

    def _new_data_dir(self) -> Path:
        scratch = self._site.scratch
        try:
            discard_data_dir(scratch)
            data_dir = choose_data_dir(f"{DATA_PREFIX}{uuid.uuid4().hex[:8]}", scratch)
            note_data_dir(scratch, data_dir)
        except OSError as error:
            raise ConfigError(str(error), "a folder that can be written", key="--scratch-dir") from error
        return data_dir

    async def _wait_for_own_name(self) -> None:
        """Wait until this host's own name resolves: the platform's DNS comes after its containers."""
        address = self._site.spec(self._site.job.host).host
        until, tell_at = monotonic() + _NAME_S, monotonic() + _NAME_TOLD_S
        while True:
            try:
                await asyncio.get_running_loop().getaddrinfo(address, None)
                return
            except socket.gaierror as error:
                if monotonic() >= until:
                    raise QuorumError(f"{address} does not resolve after {_NAME_S:.0f} s: {error}") from error
                if monotonic() >= tell_at:
                    tell_at += _NAME_TOLD_S
                    self._log(f"waiting for the name {address} to resolve")
            await sleep(0.5)

    # --- the others --------------------------------------------------------------------------------------------------

    async def _was_here(self, others: Sequence[str]) -> bool | None:
        """Whether the others know a member of this host that has served before; None where it is none any more."""
        members = EtcdMembers(Endpoints(self._site.urls(others), self._site.tls), _ASK_S)
        own = self._site.spec(self._site.job.host)
        try:
            found = await members.found()
        except (CoordinatorUnavailable, CoordinatorRefused):
            return False  # nobody serves yet: the job begins
        finally:
            await members.close()
        here = [member for member in found if member.name == own.name or own.peer_url in member.peer_urls]
        return None if not here else any(member.has_started or not member.name for member in here)

    async def _rejoin(self, others: Sequence[str], leaving: str) -> bool:
        """Have the others let go of a host's member, and of an earlier one of this host, and take in this one's.

        False where they do not.
        """
        members = EtcdMembers(Endpoints(self._site.urls(others), self._site.tls))
        own, gone = self._site.spec(self._site.job.host), self._site.spec(leaving)
        until = monotonic() + _JOIN_S
        leads = leaving == own.name  # who is back itself has refused the connections of before: nothing waits in them
        try:
            while True:
                try:
                    leads = leads or await self._let_lead(others)
                    found = await members.found()
                    waiting = [m for m in found if own.peer_url in m.peer_urls and not m.has_started and not m.name]
                    if waiting:
                        return True
                    for member in found:
                        if member.name in (own.name, leaving) or {own.peer_url, gone.peer_url} & set(member.peer_urls):
                            await members.remove(member.member_id)
                    await members.add(own.peer_url)
                    return True
                except (CoordinatorUnavailable, CoordinatorRefused) as error:
                    if monotonic() >= until:
                        self._log(f"etcd does not take this host in: {error}")
                        return False
                await sleep(_JOIN_AGAIN_S)
        finally:
            await members.close()

    async def _let_lead(self, others: Sequence[str]) -> bool:
        """Have another one lead that has next to nothing to send to a lost member, and wait for what is being sent.

        etcd lets a member go once no message to it is being written. The leader's may wait for room where a host has
        vanished, and with the leader all of etcd would wait, for longer than leases last.

        Raises:
            CoordinatorUnavailable: none leads, or there is no other one.
        """
        asked = [EtcdMembers(Endpoints(self._site.urls([host]), self._site.tls), _ASK_S) for host in others]
        here: dict[int, EtcdMembers] = {}
        leader = 0
        try:
            for members in asked:
                with contextlib.suppress(CoordinatorUnavailable, CoordinatorRefused):
                    number, followed = await members.standing()
                    here[number], leader = members, followed or leader
            heir = next((number for number in here if number != leader), None)
            if leader not in here or heir is None:
                raise CoordinatorUnavailable(f"of {', '.join(others)} {len(here)} answer, and none of them can lead")
            await here[leader].hand_over(heir)
        finally:
            for members in asked:
                await members.close()
        await sleep(_WRITES_END_S)
        return True

    async def _serves(self) -> bool:
        """Wait until the member of this host answers what takes a majority, for a bounded time."""
        own = EtcdCoordinator(self._site.urls([self._site.job.host]), tls=self._site.tls)
        until = monotonic() + _JOIN_S
        try:
            while monotonic() < until:
                with contextlib.suppress(CoordinatorUnavailable, CoordinatorRefused):
                    await own.read(_NOTHING)  # to know that nothing is there it has to ask the others
                    return True
                await sleep(_SERVES_AGAIN_S)
        finally:
            await own.close()
        return False

    def _write_entry(self, hosts: Sequence[str]) -> None:
        tls = None if self._site.tls is None else self._site.tls.ca.parent
        write_entry(self._site.scratch, self._site.job.name, self._site.urls(hosts), tls)
