"""How an etcd member is to be started, and when it is ready. The process itself is somebody else's child."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path

from keepstep.core.values import frozen
from keepstep.ports import TlsFiles

VERSION_MIN = (3, 4)

# Room for two write-ahead segments of 64 MiB, the one being prepared, and a database of a few times the live keys.
ROOM_BYTES = 512 * 1024 * 1024
_QUOTA_BYTES = 256 * 1024 * 1024
_HISTORY_REVISIONS = 1000
_RAFT_LOG_ENTRIES = 5000
_PROBE_TIMEOUT_S = 1.0
_PROBE_PAUSE_S = 0.05
_VERSION_TIMEOUT_S = 10.0

DATA_PREFIX = "keepstep-etcd-"
_NOTE = "etcd-data"


class EtcdMissing(Exception):
    """No usable etcd on this host."""

    retryable = False
    hint = (
        "install etcd 3.4 or later (`apt-get install etcd-server` on Debian 12 and Ubuntu 24.04), or name an existing "
        "one in coordination.endpoints"
    )


class EtcdNotReady(Exception):
    """The member was started and does not serve."""

    retryable = True
    hint = "see the member's log"


@frozen
class MemberSpec:
    """Where a member lives, and with whom.

    Attributes:
        host: name or address at which the others reach it.
        token: equal for all members of one etcd and for no other one's.
        others: names and peer URLs of the other members.
        joins: whether the etcd that these make up exists already, and has taken this member in.
        tls: what it proves itself with, and asks others to; None: it takes in anybody.
    """

    name: str
    host: str
    client_port: int
    peer_port: int
    data_dir: Path
    log_path: Path
    token: str
    others: tuple[tuple[str, str], ...] = ()
    joins: bool = False
    tls: TlsFiles | None = None

    @property
    def client_url(self) -> str:
        return self._url(_in_brackets(self.host), self.client_port)

    @property
    def peer_url(self) -> str:
        return self._url(_in_brackets(self.host), self.peer_port)

    def listen_urls(self) -> tuple[str, str]:
        """Where to listen, for clients and for peers: etcd takes no name there."""
        try:
            host = _in_brackets(str(ipaddress.ip_address(self.host)))
        except ValueError:
            host = "0.0.0.0"
        return self._url(host, self.client_port), self._url(host, self.peer_port)

    def _url(self, host: str, port: int) -> str:
        return f"{'http' if self.tls is None else 'https'}://{host}:{port}"


def _in_brackets(host: str) -> str:
    return f"[{host}]" if ":" in host else host


@frozen
class MemberCommand:
    """What to start; stdout and stderr belong into `log_path`."""

    argv: tuple[str, ...]
    log_path: Path
    endpoint: str
    env: Mapping[str, str] = field(default_factory=dict)
    """The whole environment: an ETCD_* variable from outside would end etcd where it meets the same flag."""


def find_etcd(search_path: str | None = None) -> Path:
    """Return the etcd binary on `search_path` (PATH's syntax; None: the process's own), checked for its version.

    Raises:
        EtcdMissing: there is none, it does not run, or it is too old.
    """
    found = shutil.which("etcd", path=search_path)
    if found is None:
        raise EtcdMissing(f"etcd is not on PATH: {EtcdMissing.hint}")
    try:
        shown = subprocess.run(
            [found, "--version"], capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S, env=_env(), check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EtcdMissing(f"{found} does not run ({error}): {EtcdMissing.hint}") from error
    version = parse_version(shown.stdout)
    if version is None:
        raise EtcdMissing(f"{found} --version says {shown.stdout[:80]!r}: {EtcdMissing.hint}")
    if version[:2] < VERSION_MIN:
        raise EtcdMissing(f"{found} is etcd {'.'.join(map(str, version))}: {EtcdMissing.hint}")
    return Path(found)


def parse_version(text: str) -> tuple[int, int, int] | None:
    """Return major, minor and patch from what `etcd --version` prints; None where it says nothing of the kind."""
    match = re.search(r"etcd Version:\s*(\d+)\.(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


def choose_data_dir(name: str, fallback: Path, shared_memory: Path = Path("/dev/shm")) -> Path:
    """Return where the member's data goes: memory where there is room for it (its data dies with the job), else disk.

    Args:
        name: of the new directory; unique on this host.
        fallback: the directory to put it in where memory is too small (a container's /dev/shm often has 64 MiB).
        shared_memory: a tmpfs.
    """
    try:
        roomy = shutil.disk_usage(shared_memory).free >= ROOM_BYTES
    except OSError:
        roomy = False
    return (shared_memory if roomy else fallback) / name


def note_data_dir(scratch: Path, data_dir: Path) -> None:
    """Write down where the member's data goes, so that whoever follows on this host can give the memory back."""
    (scratch / _NOTE).write_text(str(data_dir), encoding="utf-8")


def noted_data_dir(scratch: Path) -> Path | None:
    """Return where the data of the member that was noted last went, None where no such note is there."""
    try:
        data_dir = Path((scratch / _NOTE).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return None
    return data_dir if data_dir.is_absolute() and data_dir.name.startswith(DATA_PREFIX) else None


def discard_data_dir(scratch: Path) -> None:
    """Remove the data of the member that was noted last; no member may run on it any more."""
    data_dir = noted_data_dir(scratch)
    if data_dir is not None:
        shutil.rmtree(data_dir, ignore_errors=True)


def plan_member(binary: Path, spec: MemberSpec) -> MemberCommand:
    """Return the command of this member."""
    client_url, peer_url = spec.client_url, spec.peer_url
    listen_clients, listen_peers = spec.listen_urls()
    members = sorted((*spec.others, (spec.name, peer_url)))
    argv = (
        str(binary),
        f"--name={spec.name}",
        f"--data-dir={spec.data_dir}",
        f"--listen-client-urls={listen_clients}",
        f"--advertise-client-urls={client_url}",
        f"--listen-peer-urls={listen_peers}",
        f"--initial-advertise-peer-urls={peer_url}",
        "--initial-cluster=" + ",".join(f"{name}={url}" for name, url in members),
        f"--initial-cluster-token={spec.token}",
        f"--initial-cluster-state={'existing' if spec.joins else 'new'}",
        "--strict-reconfig-check=true",
        *_tls_flags(spec.tls),
        "--auto-compaction-mode=revision",
        f"--auto-compaction-retention={_HISTORY_REVISIONS}",
        f"--snapshot-count={_RAFT_LOG_ENTRIES}",
        "--max-snapshots=2",
        "--max-wals=2",
        f"--quota-backend-bytes={_QUOTA_BYTES}",
        "--logger=zap",
        "--log-level=warn",
        "--log-outputs=stderr",
    )
    return MemberCommand(argv=argv, log_path=spec.log_path, endpoint=client_url, env=_env())


def _tls_flags(tls: TlsFiles | None) -> tuple[str, ...]:
    """Who has no certificate of this job's authority is not let in, as a client or as a member."""
    if tls is None:
        return ()
    return tuple(
        flag
        for side in ("", "peer-")
        for flag in (
            f"--{side}cert-file={tls.cert}",
            f"--{side}key-file={tls.key}",
            f"--{side}trusted-ca-file={tls.ca}",
            f"--{side}client-cert-auth=true",
        )
    )


async def wait_until_healthy(endpoint: str, timeout_s: float, ended: asyncio.Event) -> None:
    """Return once the member serves; `ended` is set by whoever watches the process, when it is gone.

    Raises:
        EtcdNotReady: the process has ended, or the time is over.
    """
    try:
        async with asyncio.timeout(timeout_s):
            while not await _is_healthy(endpoint):
                try:
                    await asyncio.wait_for(ended.wait(), _PROBE_PAUSE_S)
                except TimeoutError:
                    continue
                raise EtcdNotReady(f"etcd at {endpoint} ended before it served: {EtcdNotReady.hint}")
    except TimeoutError:
        raise EtcdNotReady(f"etcd at {endpoint} does not serve after {timeout_s:g} s: {EtcdNotReady.hint}") from None


async def _is_healthy(endpoint: str) -> bool:
    host, _, port = endpoint.partition("://")[2].rpartition(":")
    try:
        async with asyncio.timeout(_PROBE_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            try:
                writer.write(b"GET /health HTTP/1.0\r\nHost: etcd\r\n\r\n")
                answer = await reader.read(4096)
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False
    return is_health_answer(answer)


def is_health_answer(answer: bytes) -> bool:
    """True where an HTTP answer says what a healthy etcd says."""
    head, _, body = answer.partition(b"\r\n\r\n")
    if b" 200 " not in head.split(b"\r\n", 1)[0]:
        return False
    try:
        return bool(json.loads(body).get("health") == "true")
    except (ValueError, AttributeError):
        return False


def _env() -> dict[str, str]:
    """Return the environment: nothing, but for what etcd 3.4 wants to hear on 64-bit ARM."""
    return {"ETCD_UNSUPPORTED_ARCH": "arm64"} if platform.machine() in ("aarch64", "arm64") else {}
