"""What a job of several hosts needs on each of them: etcd, its member here, certificates, a listener for the others.

Loaded for such jobs alone: a single host need not wait for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from keepstep.adapters.certificates import tls_files
from keepstep.adapters.etcd import EtcdCoordinator
from keepstep.adapters.init_link import InitLink
from keepstep.adapters.peers import listen
from keepstep.app.members import Members, Site
from keepstep.app.setting_up import Setup
from keepstep.app.storing import Giving, Storing
from keepstep.app.trust import Trust, trust_of
from keepstep.core.job import JobSpec
from keepstep.core.state import State

_WATCH_IDLE_S = 4.0
"""A watch that is silent for so long is asked whether it still hears the others' etcd: its member may be cut off."""


class Several:
    """This host's part in what the hosts agree through.

    Attributes:
        members: etcd's, once it is open.
    """

    def __init__(self, setup: Setup, init: InitLink, log: Callable[[str], None]) -> None:
        """Begin to listen."""
        self._setup, self._init, self._log = setup, init, log
        self._listener = listen(setup.job.address)
        self._trust: Trust | None = None
        self._coordinator: EtcdCoordinator | None = None
        self.members: Members | None = None

    @property
    def port(self) -> int:
        """Where other hosts get what is in this one's slabs, if they can prove themselves, and try the line to it."""
        return int(self._listener.getsockname()[1])

    async def open(self, job: JobSpec) -> EtcdCoordinator:
        """Reach etcd, the member of this host started first.

        Raises:
            KeepstepError: it is not to be had.
        """
        setup = self._setup
        external = setup.policy.coordination.endpoints
        site = Site(
            job,
            setup.policy.coordination.port,
            setup.options.etcd,
            setup.places.scratch,
            setup.environment.get("PATH"),
            () if external == "embedded" else tuple(external),
        )
        if setup.has_trust and setup.store is not None:
            self._trust = trust_of(site, setup.store, self._log)
            tls, token = await self._trust.obtain(again=job.boot > 0)
            site = replace(site, tls=tls, token=token)
        self._coordinator = EtcdCoordinator(site.urls(job.etcd_hosts), tls=site.tls, idle_s=_WATCH_IDLE_S)
        self.members = Members(site, self._coordinator, self._init, self._log)
        await self.members.start()
        return self._coordinator

    def give(self, storing: Storing, wire_fd: int) -> None:
        """Have the uploader give others what is in the slabs, where they can prove themselves."""
        files = None if self._trust is None else tls_files(self._trust.folder)
        storing.give(Giving(self._listener, files), wire_fd)

    def keep(self, tasks: asyncio.TaskGroup) -> list[asyncio.Task[Any]]:
        """Begin what goes on beside the node: certificates are made anew where the authority is another one."""
        if self._trust is None or self._coordinator is None or self.members is None:
            return []
        return [tasks.create_task(self._trust.keep(self._coordinator, self.members))]

    def companion_exited(self, name: str, status: int) -> None:
        """A process that outlives agents has ended."""
        if name == "etcd" and self.members is not None:
            self.members.exited(status)

    async def end(self, state: State, storing: Storing) -> None:
        """Take back from the store what is of this job alone."""
        if self._trust is not None:
            await self._trust.end(state, storing.ask)
