"""What an operator asks of a running job, and orders it to do, through its etcd: status, drain, restart, cordon.

An agent leaves `coordination.json` in its scratch folder: where etcd is, under which prefix the job's records lie, and
where the certificate is that opens it. Whoever may read that file may give orders.
"""

from __future__ import annotations

import getpass
import json
import tempfile
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from keepstep.adapters.clock import unix_time
from keepstep.adapters.etcd import EtcdCoordinator
from keepstep.app.coordination import prefix_of
from keepstep.app.showing import cell, table
from keepstep.core.codec import Undecodable, decode_record, encode_record
from keepstep.core.names import in_natural_order
from keepstep.core.preflight_records import PreflightRecord
from keepstep.core.records import (
    CordonRecord,
    EtcdRecord,
    GenerationRecord,
    LeaderRecord,
    NodeRecord,
    OrderRecord,
    Record,
    RequestRecord,
    StatusRecord,
)
from keepstep.core.values import frozen
from keepstep.errors import ConfigError, QuorumError
from keepstep.ports import Coordinator, CoordinatorRefused, CoordinatorUnavailable, TlsFiles

FILE = "coordination.json"
_ORDER_LASTS_S = 900.0
"""An order that nobody has carried out by then is forgotten: it must not meet a later run."""
_TOLD = ("number", "restarts", "durable_step", "drain_step", "snapshot_every", "pause", "exit_code", "verdict")
_COLUMNS = ("host", "node", "rank", "standing", "step", "sealed", "marks")


@frozen
class Entry:
    """How to reach a job's coordinator."""

    job: str
    prefix: str
    endpoints: tuple[str, ...]
    tls: Path | None


def find_entry(at: Path | None) -> Entry:
    """Read the file that an agent has left.

    Args:
        at: the file, a scratch folder, or the `--out` folder of a local run; None: the newest of this machine.

    Raises:
        ConfigError: there is none, or it is not what an agent writes.
    """
    where = Path(tempfile.gettempdir()) if at is None else at
    patterns = (f"keepstep-*/{FILE}",) if at is None else (FILE, f"hosts/*/scratch/{FILE}")
    found = [at] if at is not None and at.is_file() else [path for each in patterns for path in where.glob(each)]
    dated: list[tuple[float, Path]] = []
    for path in found:
        with suppress(OSError):
            dated.append((path.stat().st_mtime, path))
    if not dated:
        raise ConfigError(
            f"{where} holds no {FILE}", "the scratch folder of a running job of several hosts", key="--at"
        )
    path = max(dated)[1]
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        tls = None if raw["tls"] is None else Path(raw["tls"])
        return Entry(str(raw["job"]), str(raw["prefix"]), tuple(map(str, raw["endpoints"])), tls)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"found {error!r}", "what an agent writes", file=str(path)) from error


def open_coordinator(entry: Entry) -> Coordinator:
    """A client of the job's etcd, with the certificate of the node that left the entry."""
    folder = entry.tls
    tls = None if folder is None else TlsFiles(folder / "ca.pem", folder / "node.pem", folder / "node.key")
    return EtcdCoordinator(entry.endpoints, tls=tls)


def write_entry(scratch: Path, job: str, endpoints: Sequence[str], tls: Path | None) -> None:
    """Leave the file behind by which an operator finds the job; only this user can read it.

    Raises:
        OSError: it can not be written.
    """
    entry = {
        "job": job,
        "prefix": prefix_of(job),
        "endpoints": list(endpoints),
        "tls": None if tls is None else str(tls),
    }
    new = scratch / f"{FILE}.new"
    new.touch(mode=0o600)
    new.write_text(json.dumps(entry), encoding="utf-8")
    new.replace(scratch / FILE)


class Operator:
    """One operator's dealings with one job."""

    def __init__(self, coordinator: Coordinator, prefix: str, who: str | None = None) -> None:
        self._coordinator, self._prefix = coordinator, prefix
        self._who = who or _user()

    async def records(self) -> list[Record]:
        """All of the job's records that are understood.

        Raises:
            QuorumError: nobody answers, or the job has no record.
        """
        try:
            _, found = await self._coordinator.read(self._prefix)
        except (CoordinatorUnavailable, CoordinatorRefused) as error:
            raise QuorumError(f"the job's etcd does not answer: {error}") from error
        records = []
        for kv in found:
            with suppress(Undecodable):
                records.append(decode_record(kv.value))
        return records

    async def drain(self, grace_s: float) -> str:
        """Have the job stop at one agreed step, commit it and end with 143, as an interruption would."""
        now = unix_time()
        await self._put(RequestRecord("operator", f"drain by {self._who}", now, now + grace_s), leased=True)
        return f"drain ordered; it has {grace_s:.0f} s"

    async def restart(self) -> str:
        """Have all workers stop at one agreed step and start anew from there."""
        order = OrderRecord(uuid.uuid4().hex[:8], self._who, unix_time())
        await self._put(order, leased=True)
        return f"restart {order.order_id} ordered"

    async def cordon(self, host: str, why: str) -> str:
        """Have the job go on without a host, until it is uncordoned."""
        await self._check_host(host)
        await self._put(CordonRecord(host, self._who, unix_time(), why), leased=False)
        return f"{host} is cordoned"

    async def uncordon(self, host: str) -> str:
        """Let a host take part again.

        Raises:
            ConfigError: it is not cordoned.
        """
        deleted = await self._carried_out(self._coordinator.delete(f"{self._prefix}cordons/{host}"))
        if not deleted:
            raise ConfigError(f"{host} is not cordoned", "a host that is; `keepstep status` shows them", key="HOST")
        return f"{host} is uncordoned"

    async def _check_host(self, host: str) -> None:
        known = {row["host"] for row in describe(await self.records())["hosts"]}
        if host not in known:
            raise ConfigError(f"found {host}", f"one of {', '.join(sorted(known)) or 'no hosts'}", key="HOST")

    async def _put(self, record: Record, leased: bool) -> None:
        if not any(isinstance(each, GenerationRecord | NodeRecord) for each in await self.records()):
            raise QuorumError("the job has no hosts yet")
        lease = await self._carried_out(self._coordinator.grant(_ORDER_LASTS_S)) if leased else 0
        await self._carried_out(self._coordinator.put(self._prefix + record.key, encode_record(record), lease=lease))

    async def _carried_out(self, request: Any) -> Any:
        try:
            return await request
        except (CoordinatorUnavailable, CoordinatorRefused) as error:
            raise QuorumError(f"the job's etcd did not take the order: {error}") from error


def describe(records: list[Record]) -> dict[str, Any]:
    """The job as plain JSON values: the generation, and one row for each host."""
    generation = next((r for r in records if isinstance(r, GenerationRecord)), None)
    leader = next((r for r in records if isinstance(r, LeaderRecord)), None)
    etcd = next((r for r in records if isinstance(r, EtcdRecord)), None)
    nodes = {r.host: r for r in records if isinstance(r, NodeRecord)}
    number = 0 if generation is None else generation.number
    statuses = {r.host: r for r in records if isinstance(r, StatusRecord) and r.generation == number}
    cordons = {r.host: r for r in records if isinstance(r, CordonRecord)}
    checks = {r.host: r for r in records if isinstance(r, PreflightRecord)}
    members = {} if generation is None else {m.host: rank for rank, m in enumerate(generation.members)}
    hosts = []
    for host in in_natural_order((*{*nodes, *members, *cordons},)):
        status = statuses.get(host)
        silent = "lost" if host not in nodes else "starting" if host in members else "out"
        marks = [name for name, holds in (
            ("leader", leader is not None and leader.host == host),
            ("etcd", etcd is not None and host in etcd.hosts),
            ("cordoned", host in cordons),
        ) if holds]  # fmt: skip
        hosts.append({
            "host": host,
            "node": nodes[host].node_id if host in nodes else None,
            "rank": members.get(host),
            "standing": status.standing.value if status is not None else silent,
            "step": status.step if status is not None else None,
            "sealed": status.sealed if status is not None else None,
            "marks": marks,
            "strains": list(status.strains) if status is not None else [],
            "cordon": f"{cordons[host].by}: {cordons[host].why}" if host in cordons else None,
            "preflight": asdict(checks[host]) if host in checks else None,
        })  # fmt: skip
    told: dict[str, Any] = {}
    if generation is not None:
        told = {name: getattr(generation, name) for name in _TOLD} | {"phase": generation.phase.value}
    waiting = [r.source for r in records if isinstance(r, RequestRecord)]
    return {"generation": told, "hosts": hosts, "interruptions": waiting, "records": len(records)}


def tell(job: str, described: dict[str, Any]) -> str:
    """The same for people: a headline, and a table."""
    told = described["generation"]
    lines = [f"{job}: no generation yet"]
    if told:
        lines = [
            f"{job}: generation {told['number']} {told['phase']}, {told['restarts']} restarts, committed step "
            f"{told['durable_step']}" + (f", pauses: {told['pause']}" if told["pause"] else "")
        ]
        if told["verdict"]:
            lines.append(f"ended with {told['exit_code']}: {told['verdict']}")
    lines += [f"interruption: {source}" for source in described["interruptions"]]
    lines.append(table(_COLUMNS, ([cell(row[name]) for name in _COLUMNS] for row in described["hosts"])))
    for row in described["hosts"]:
        lines += [f"{row['host']} is cordoned by {row['cordon']}"] if row["cordon"] else []
        lines += [f"{row['host']} is strained: {strain}" for strain in row["strains"]]
    return "\n".join(lines)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "operator"
