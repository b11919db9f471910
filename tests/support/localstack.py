"""LocalStack's S3 as a process: the server for tests in which conditions, races and checksums matter."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from keepstep import kernel
from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("KEEPSTEP_LOCALSTACK_PYTHON", str(ROOT / ".venv-localstack" / "bin" / "python"))
START_S = 120.0


@contextlib.contextmanager
def localstack(folder: Path) -> Iterator[str]:
    """Serve S3 until the end of the block; gives the endpoint. What it prints and keeps lies in `folder`."""
    port = free_port()
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "PYTHON"))},
        "SERVICES": "s3", "STRICT_SERVICE_LOADING": "1", "GATEWAY_LISTEN": f"127.0.0.1:{port}", "DNS_ADDRESS": "0",
        "DISABLE_EVENTS": "1", "SKIP_SSL_CERT_DOWNLOAD": "1", "EAGER_SERVICE_LOADING": "1",
        "FILESYSTEM_ROOT": str(folder / "data"), "HOME": str(folder), "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1",
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log").open("wb") as log:
        words = [PYTHON, "-c", "from localstack.runtime.main import main; main()"]
        server = subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        _wait_until_it_answers(server, port, folder / "log")
        yield f"http://127.0.0.1:{port}"
    finally:
        for pid in (server.pid, *kernel.family(kernel.processes(), [server.pid])):
            kernel.kill(pid)
        server.wait(30)


def _wait_until_it_answers(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    give_up = time.monotonic() + START_S
    while True:
        with contextlib.suppress(OSError):
            opener.open(f"http://127.0.0.1:{port}/_localstack/health", timeout=5).close()
            return
        told = log.read_text(errors="replace")[-3000:]
        assert server.poll() is None, f"LocalStack has ended:\n{told}"
        assert time.monotonic() < give_up, f"LocalStack does not answer:\n{told}"
        time.sleep(0.1)
