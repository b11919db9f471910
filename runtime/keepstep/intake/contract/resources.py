"""`resourceconfig.json`: who the hosts are, and which one this is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from keepstep.core.names import in_natural_order
from keepstep.core.values import frozen
from keepstep.intake.contract.documents import Document
from keepstep.intake.files import show

_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
LOCALHOST = "localhost"
DEFAULT_INTERFACE = "eth0"
_NAMES = {
    "network_interface_name": DEFAULT_INTERFACE,
    "current_group_name": "homogeneousCluster",
    "current_instance_type": "ml.p4d.24xlarge",
}


@frozen
class Resources:
    """The job's hosts.

    Attributes:
        hosts: in natural order.
        config: the file as it is.
    """

    current_host: str
    hosts: tuple[str, ...]
    network_interface_name: str
    config: Mapping[str, Any]


def parse_resources(document: Document) -> Resources:
    """Check the hosts and name this one.

    Raises:
        ConfigError: hosts are missing, empty, repeated or no names; this host is not among them.
    """
    values = document.values
    hosts = values.get("hosts")
    if not isinstance(hosts, list) or not hosts:
        found = "the key is missing" if "hosts" not in values else f"found {show(hosts)}"
        raise document.error("hosts", found, "a list of host names, at least one")
    for host in hosts:
        if not _is_host(host):
            raise document.error("hosts", f"found {show(host)} in the list", "host names of letters, digits, . _ and -")
    repeated = sorted({host for host in hosts if hosts.count(host) > 1})
    if repeated:
        raise document.error("hosts", f"found {show(repeated[0])} twice", "each host once")
    current = values.get("current_host")
    if not _is_host(current):
        found = "the key is missing" if "current_host" not in values else f"found {show(current)}"
        raise document.error("current_host", found, "this host's name")
    if current not in hosts:
        raise document.error("current_host", f"found {show(current)}", f"one of the hosts: {', '.join(hosts[:8])}")
    for key, example in _NAMES.items():
        if not isinstance(values.get(key), str | None):
            raise document.error(key, f"found {show(values[key])}", f"a name such as {example}")
    interface = values.get("network_interface_name")
    _check_groups(document, hosts)
    return Resources(str(current), in_natural_order(tuple(hosts)), interface or DEFAULT_INTERFACE, values)


def single_host() -> Resources:
    """One host that no platform has described: a laptop."""
    return Resources(LOCALHOST, (LOCALHOST,), "lo", {"current_host": LOCALHOST, "hosts": [LOCALHOST]})


def instance_groups(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The instance groups as they are; none in local mode."""
    return list(config.get("instance_groups") or [])


def _check_groups(document: Document, hosts: list[str]) -> None:
    groups = document.values.get("instance_groups")
    if groups is None:
        return
    if not isinstance(groups, list):
        raise document.error("instance_groups", f"found {show(groups)}", "a list of instance groups")
    for group in groups:
        name = group.get("instance_group_name") if isinstance(group, dict) else None
        members = group.get("hosts") if isinstance(group, dict) else None
        if not isinstance(name, str) or not isinstance(members, list):
            raise document.error("instance_groups", f"found {show(group)}", "groups with instance_group_name and hosts")
        strangers = [member for member in members if member not in hosts]
        if strangers:
            raise document.error("instance_groups", f"found {show(strangers[0])} in {name}", "members of hosts")


def _is_host(name: object) -> bool:
    return isinstance(name, str) and _HOST.fullmatch(name) is not None
