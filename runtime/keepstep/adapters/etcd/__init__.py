"""The coordinator of jobs with more than one host: etcd 3.4 or later, through its JSON gateway.

What lives here: blocking calls to one of several endpoints (`gateway`), the port itself (`coordinator`), the watch
(`watch`) and etcd's own membership (`members`). What must never enter: a decision about leases, leaders or generations,
or the starting of etcd itself (that is `keepstep.adapters.etcd_member`). Start reading at `coordinator`.

urllib3 carries the requests, and what is asked is etcd's own JSON: a client library in between took twice the time, and
none has a watch that reconnects, tells a compacted history and can be given a timeout.
"""

from __future__ import annotations

from keepstep.adapters.etcd.coordinator import EtcdCoordinator
from keepstep.adapters.etcd.gateway import Endpoints
from keepstep.adapters.etcd.members import EtcdMembers

__all__ = ["Endpoints", "EtcdCoordinator", "EtcdMembers"]
