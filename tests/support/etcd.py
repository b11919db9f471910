"""A real etcd for tests: free loopback ports, data in a folder given, stopped by its pid."""

from __future__ import annotations

import contextlib
import http.client
import shutil
import ssl
import subprocess
import time
import uuid
from pathlib import Path

from keepstep.adapters.certificates import Authority, issue, make_authority, write_files
from keepstep.adapters.etcd_member import MemberSpec, find_etcd, is_health_answer, plan_member
from keepstep.ports import TlsFiles
from tests.support.ports import free_port

_START_TIMEOUT_S = 60.0


def make_tls(folder: Path, authority: Authority | None = None, days: int = 60) -> TlsFiles:
    """Files of a node on this machine, by this authority or by one of its own."""
    authority = authority or make_authority("test", time.time())
    return write_files(folder, authority.certificate, *issue(authority, ["127.0.0.1", "localhost"], time.time(), days))


class EtcdServer:
    """One etcd. `start` waits until it serves; `restart(empty=True)` is a host that died and came back."""

    def __init__(
        self, folder: Path, name: str = "test", tls: TlsFiles | None = None, data_dir: Path | None = None
    ) -> None:
        self.binary = find_etcd()  # EtcdMissing says what to install
        self.folder, self.name, self.tls = folder, name, tls
        self.log_path = folder / "etcd.log"
        self.port = free_port()
        self.peer_port = free_port()
        self.token = uuid.uuid4().hex
        self.others: tuple[tuple[str, str], ...] = ()
        self.joins = False
        self._data_dir = data_dir or folder / "data"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def spec(self) -> MemberSpec:
        """What it is started as."""
        return MemberSpec(
            self.name, "127.0.0.1", self.port, self.peer_port, self._data_dir, self.log_path, self.token,
            others=self.others, joins=self.joins, tls=self.tls,
        )  # fmt: skip

    @property
    def endpoint(self) -> str:
        return self.spec.client_url

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> EtcdServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self, wait: bool = True) -> None:
        """Start it; a member of several serves once most of them are there."""
        command = plan_member(self.binary, self.spec)
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command.argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=dict(command.env)
            )
        if wait:
            self.wait_until_it_serves()

    def wait_until_it_serves(self) -> None:
        assert self._process is not None
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not self._serves():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=0.05)
                raise AssertionError(f"etcd ended with {self._process.returncode}:\n{self.log_path.read_text()}")
            if time.monotonic() > deadline_s:
                self.kill()
                raise AssertionError(f"etcd does not serve after {_START_TIMEOUT_S} s:\n{self.log_path.read_text()}")

    def kill(self) -> None:
        """End it at once, as a machine that loses power would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self, *, empty: bool, same_token: bool = False) -> None:
        """Kill it and start it at the same address, with its data or with none."""
        self.kill()
        if empty:
            shutil.rmtree(self._data_dir)
            self.token = self.token if same_token else uuid.uuid4().hex
        self.start()

    def _serves(self) -> bool:
        connection = self._connection()
        try:
            connection.request("GET", "/health")
            response = connection.getresponse()
            return is_health_answer(b"HTTP/1.1 %d OK\r\n\r\n" % response.status + response.read())
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        if self.tls is None:
            return http.client.HTTPConnection("127.0.0.1", self.port, timeout=1)
        context = ssl.create_default_context(cafile=str(self.tls.ca))
        context.load_cert_chain(self.tls.cert, self.tls.key)
        return http.client.HTTPSConnection("127.0.0.1", self.port, timeout=1, context=context)


class EtcdCluster:
    """One etcd of several members on this machine."""

    def __init__(self, folder: Path, size: int = 3, tls: TlsFiles | None = None) -> None:
        self.members = [self._member(folder, f"algo-{number}", tls) for number in range(1, size + 1)]
        for member in self.members:
            member.token = self.members[0].token
            member.others = tuple((each.name, each.spec.peer_url) for each in self.members if each is not member)

    @staticmethod
    def _member(folder: Path, name: str, tls: TlsFiles | None) -> EtcdServer:
        (folder / name).mkdir(parents=True)
        return EtcdServer(folder / name, name, tls)

    @property
    def endpoints(self) -> list[str]:
        return [member.endpoint for member in self.members]

    def __enter__(self) -> EtcdCluster:
        for member in self.members:
            member.start(wait=False)
        for member in self.members:
            member.wait_until_it_serves()
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.members:
            member.kill()
