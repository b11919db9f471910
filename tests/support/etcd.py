"""A real etcd for tests: free loopback ports, data in a folder given, stopped by its pid."""

from __future__ import annotations

import contextlib
import http.client
import shutil
import socket
import subprocess
import time
import uuid
from pathlib import Path

from keepstep.adapters.etcd_member import MemberSpec, find_etcd, is_health_answer, plan_member

_START_TIMEOUT_S = 15.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class EtcdServer:
    """One etcd. `start` waits until it serves; `restart(empty=True)` is a host that died and came back."""

    def __init__(self, folder: Path) -> None:
        self.binary = find_etcd()  # EtcdMissing says what to install
        self.folder = folder
        self.log_path = folder / "etcd.log"
        self.port = free_port()
        self._peer_port = free_port()
        self._data_dir = folder / "data"
        self._token = uuid.uuid4().hex
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> EtcdServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        spec = MemberSpec("test", "127.0.0.1", self.port, self._peer_port, self._data_dir, self.log_path, self._token)
        command = plan_member(self.binary, spec)
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command.argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=dict(command.env)
            )
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
            self._token = self._token if same_token else uuid.uuid4().hex
        self.start()

    def _serves(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=1)
        try:
            connection.request("GET", "/health")
            response = connection.getresponse()
            return is_health_answer(b"HTTP/1.1 %d OK\r\n\r\n" % response.status + response.read())
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()
