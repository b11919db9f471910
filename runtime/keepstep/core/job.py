"""What is known of the job at start and never changes while the node lives."""

from __future__ import annotations

from typing import Literal

from keepstep.core.values import frozen

EntryKind = Literal["script", "module", "command"]
"""What runs: a Python script, a module of a package that was installed (`python -m`), or any other program."""


@frozen
class MpiSpec:
    """How mpirun is to start a job's ranks.

    Attributes:
        processes: ranks on each host.
        interface: the network between the hosts.
        instance_type: of the hosts, as `ml.p4d.24xlarge`.
        options: the user's own words for mpirun.
        nccl_debug: how much NCCL says.
        total: ranks on all hosts; 0: as many as each host has, times the hosts.
        has_smddprun: whether SageMaker's data parallel library brought what it wants to be started by.
    """

    processes: int
    interface: str
    instance_type: str
    options: tuple[str, ...] = ()
    nccl_debug: str = "INFO"
    total: int = 0
    has_smddprun: bool = False


@frozen
class JobSpec:
    """One node's view of its job.

    Attributes:
        name: the job's name; the prefix of its keys in etcd and in the store.
        host: this host's name, one of `hosts`.
        hosts: every host of the job: those that train, the feeders, the idle ones, each in natural order.
        node_id: this incarnation of the supervisor: host and boot nonce, never used twice.
        boot: how often this host's agent was started before, 0 at first.
        address: where other hosts reach this one's workers.
        port_base: first of `PORT_SPAN` ports that the workers of successive generations listen on in turn.
        run: nonce of this run, part of object names in the store.
        strategy: plain, mirrored, multi_worker, one of parameter servers, or one that mpirun starts; `auto` is resolved
            before the core sees it.
        python: the user's interpreter.
        script: what runs: a path as the script is to see it, or the module's name.
        arguments: the script's arguments.
        has_store: whether checkpoints are committed anywhere.
        etcd_hosts: the hosts that start an etcd member at first; empty where there is one already, or none is needed.
        peer_port: where this host gives others what is in its slabs; 0: nowhere.
        kind: what kind of thing `script` is.
        feeders: those of the hosts that do not train, but run tf.data's service for those that do.
        idle: those that neither train nor feed: of an instance group without a part.
        evaluates: whether, with parameter servers, one more process of the script evaluates beside the chief.
        mpi: how ranks are started where mpirun does that; else None.
        machine: the boot id of the host's machine: a name that goes to other hardware says nothing of it.
        watch: the folder in which the script may write checkpoints of its own; empty where none is watched.
    """

    name: str
    host: str
    hosts: tuple[str, ...]
    node_id: str
    boot: int
    address: str
    port_base: int
    run: str
    strategy: str
    python: str
    script: str
    arguments: tuple[str, ...]
    has_store: bool
    etcd_hosts: tuple[str, ...] = ()
    peer_port: int = 0
    watch: str = ""
    kind: EntryKind = "script"
    mpi: MpiSpec | None = None
    evaluates: bool = False
    feeders: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()
    machine: str = ""

    @property
    def trainers(self) -> tuple[str, ...]:
        """The hosts that may train."""
        return self.hosts[: len(self.hosts) - len(self.feeders) - len(self.idle)]

    @property
    def keeps_etcd(self) -> bool:
        """Whether this host starts an etcd member."""
        return self.host in self.etcd_hosts


def first_etcd_hosts(hosts: tuple[str, ...]) -> tuple[str, ...]:
    """The hosts to start etcd on: one below three hosts, three from 3, five from 64; none for a single host."""
    if len(hosts) < 2:
        return ()
    return hosts[: 1 if len(hosts) < 3 else 3 if len(hosts) < 64 else 5]


PORT_SPAN = 500
"""Successive generations walk through this many ports, so that no two that overlap in time share one."""


def port_from(port_base: int, generation: int) -> int:
    """The port that a host whose ports begin there has in `generation`."""
    return port_base + generation % PORT_SPAN
