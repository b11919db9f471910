"""What others write beside the stage: an operator's wishes, hosts that come, who keeps etcd."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from keepstep.core import events as e
from keepstep.core.failures import Charges
from keepstep.core.records import CordonRecord, EtcdRecord, NodeRecord, OrderRecord


class _Stage(Protocol):
    now: float
    charges: Charges
    _inbox: deque[e.Event]

    def happens(self, event: e.Event) -> None: ...

    def write(self, record: object) -> int: ...

    def vanish(self, key: str) -> None: ...


class Operated:
    """A stage on which others write, too."""

    def charged_before(self: _Stage, restarts: str) -> None:
        """An earlier attempt of the job was restarted so often, and the store knows."""
        self.charges = Charges(int(restarts))

    def cordoned(self: _Stage, host: str) -> None:
        """An operator wants a host out."""
        _tell(self, CordonRecord(host, "operator", self.now))

    def uncordoned(self: _Stage, host: str) -> None:
        self.vanish(f"cordons/{host}")
        self.happens(self._inbox.popleft())

    def restart_ordered(self: _Stage, order_id: str) -> None:
        """An operator wants all workers to start anew."""
        _tell(self, OrderRecord(order_id, "operator", self.now))

    def host_arrives(self: _Stage, host: str) -> None:
        """A host without a mind of its own: its node is there, and nothing else."""
        _tell(self, NodeRecord(host, f"{host}-x", "10.0.0.9", 900))

    def etcd_kept_by(self: _Stage, *hosts: str, joining: str = "", leaving: str = "") -> None:
        _tell(self, EtcdRecord(hosts, joining, leaving))

    def joins_etcd_for(self: _Stage, leaving: str, *hosts: str) -> None:
        """The leader names this host for a member that is lost."""
        _tell(self, EtcdRecord(hosts, "algo-1", leaving))


def _tell(stage: _Stage, record: object) -> None:
    stage.happens(e.RecordSeen(record, stage.write(record)))  # type: ignore[arg-type]
