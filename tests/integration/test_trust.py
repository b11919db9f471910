"""Hosts that trust each other: real agents, members and uploaders of one job, and whether their keys get about."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from keepstep.adapters.certificates import make_authority, parse_authority, read_files, tls_files
from keepstep.adapters.etcd import EtcdCoordinator
from keepstep.app.trust import Trust
from keepstep.ports import CoordinatorUnavailable
from tests.support.etcd import EtcdServer, make_tls
from tests.support.giving import refusal

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
HOSTS = ("algo-1", "algo-2", "algo-3")
_DEADLINE_S = 60.0
GATED = """
import runpy, time
from pathlib import Path

while not Path({gate!r}).exists():
    time.sleep(0.01)
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.fixture(autouse=True)
def _source(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uploaders are processes of their own, and are to find the source tree."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "runtime"))


class Job:
    """Three hosts on this machine that train without TensorFlow, once they are let."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.output, self.gate = folder, folder / "output", folder / "gate"
        script = folder / "gated.py"
        lockstep = ROOT / "tests" / "support" / "lockstep_job.py"
        script.write_text(GATED.format(gate=str(self.gate), script=str(lockstep)))
        words = (
            *(sys.executable, "-m", "keepstep", "local", "--quiet", "--hosts", "3", "--python", sys.executable),
            *("--out", str(folder), "--store", str(folder / "store")),
            *(str(script), str(folder), "100", "0.05"),
        )
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def wait_for(self, look: Callable[[], object], what: str) -> None:
        give_up = time.monotonic() + _DEADLINE_S
        while not look():
            assert self.process.poll() is None, f"ended before {what}: {self.told()}"
            assert time.monotonic() < give_up, f"no {what}: {self.told()}"
            time.sleep(0.05)

    def log(self, host: str) -> str:
        path = self.folder / "hosts" / host / "log.txt"
        return path.read_text() if path.exists() else ""

    def told(self) -> str:
        return "\n".join([self.output.read_text(), *(self.log(host)[-3000:] for host in HOSTS)])

    def authority(self) -> Path:
        return next((self.folder / "store").rglob("authority.json"), self.folder / "nothing")

    def journal(self, host: str) -> str:
        return "".join(path.read_text() for path in (self.folder / "hosts" / host).rglob("journal*.jsonl"))

    def workers(self) -> list[int]:
        """Pids of the workers that were started."""
        found = []
        for host in HOSTS:
            for line in self.journal(host).splitlines(keepends=True):
                if '"worker_started"' in line and line.endswith("\n"):
                    found.append(int(json.loads(line)["event"]["pid"]))
        return found


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    job.gate.touch()
    if job.process.poll() is None:
        job.process.terminate()
        job.process.wait(60)


def bodies(pem: str) -> list[str]:
    """The lines of a key that are its own; the first says the same of every key of the kind."""
    return pem.splitlines()[2:-1]


def test_the_keys_of_a_job_are_where_they_belong_and_nowhere_else(job):
    job.wait_for(lambda: len(job.workers()) == 3, "worker on each host")
    authority = json.loads(job.authority().read_text())
    nodes = [job.folder / "hosts" / host / "scratch" / "tls" for host in HOSTS]
    secrets = bodies(authority["key"]) + [line for node in nodes for line in bodies((node / "node.key").read_text())]
    assert len(set(secrets)) == len(secrets) >= 4
    seen = {f"environment of {pid}": Path(f"/proc/{pid}/environ").read_text() for pid in job.workers()}
    seen |= {f"command of {pid}": Path(f"/proc/{pid}/cmdline").read_text() for pid in job.workers()}
    for host in HOSTS:
        port = re.search(r"metrics on port (\d+)", job.log(host))
        assert port
        with urllib.request.urlopen(f"http://127.0.0.1:{port[1]}/metrics", timeout=30) as answer:
            seen[f"metrics of {host}"] = answer.read().decode()
        entry = json.loads((job.folder / "hosts" / host / "scratch" / "coordination.json").read_text())
        assert all(url.startswith("https://") for url in entry["endpoints"]) and len(entry["endpoints"]) == 3
    job.gate.touch()
    assert job.process.wait(_DEADLINE_S) == 0, job.told()
    assert not job.authority().exists(), "the authority outlives the job"
    for path in job.folder.rglob("*"):
        if path.is_file() and path.parent not in nodes:
            seen[str(path)] = path.read_bytes().decode(errors="replace")
    assert any(name.endswith(".jsonl") for name in seen) and any(name.endswith("log.txt") for name in seen)
    assert [(name, line) for name, text in seen.items() for line in secrets if line in text] == []


def test_neither_etcd_nor_an_agent_lets_in_who_has_no_certificate_of_this_job(job, tmp_path):
    job.wait_for(lambda: len(job.workers()) == 3, "worker on each host")
    authority = parse_authority(job.authority().read_text(), time.time())
    strangers = {
        "none": None,
        "foreign": make_tls(tmp_path / "foreign"),
        "expired": make_tls(tmp_path / "expired", authority, days=-1),
    }
    ports = {f"agent of {host}": int(re.findall(r'"peer_port": ?(\d+)', job.journal(host))[-1]) for host in HOSTS}
    entry = json.loads((job.folder / "hosts" / HOSTS[0] / "scratch" / "coordination.json").read_text())
    ports |= {f"etcd at {url}": int(url.rpartition(":")[2]) for url in entry["endpoints"]}
    assert len(ports) == 6 and all(ports.values())
    ca = tls_files(job.folder / "hosts" / HOSTS[0] / "scratch" / "tls").ca
    said = {(who, whose): refusal(port, ca, own) for who, port in ports.items() for whose, own in strangers.items()}
    assert [(key, text) for key, text in said.items() if "ALERT" not in text] == []


def test_several_hosts_without_a_store_are_told_what_going_without_means(tmp_path):
    words = (
        *(sys.executable, "-m", "keepstep", "local", "--hosts", "2", "--python", sys.executable, "--out"),
        *(str(tmp_path), "--store", "none", str(ROOT / "tests" / "support" / "lockstep_job.py"), str(tmp_path), "5"),
    )
    shown = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert shown.returncode == 78
    assert "coordination.tls" in shown.stdout and "tls=off" in shown.stdout


# --- one node's part, with a real uploader and a store in a directory ------------------------------------------------


def node(folder: Path, name: str, said: list[str]) -> Trust:
    return Trust("job", str(folder / "store"), folder / name / "tls", (name,), (), said.append)


def test_hosts_that_start_together_get_one_authority(tmp_path):
    async def scenario():
        nodes = [node(tmp_path, f"algo-{n}", []) for n in range(1, 4)]
        return await asyncio.gather(*(each.obtain(again=False) for each in nodes))

    found = asyncio.run(scenario())
    assert len({token for _, token in found}) == 1
    assert len({files.ca.read_bytes() for files, _ in found}) == 1
    assert len({files.cert.read_bytes() for files, _ in found}) == 3


def test_what_is_no_authority_any_more_is_replaced(tmp_path):
    async def scenario():
        nonlocal said
        first = await node(tmp_path, "algo-1", said).obtain(again=False)
        (document,) = (tmp_path / "store").rglob("authority.json")
        document.write_text(make_authority("job", time.time() - 100 * 86_400).document())
        return first, await node(tmp_path, "algo-2", said).obtain(again=False), document.read_text()

    said: list[str] = []
    first, second, document = asyncio.run(scenario())
    assert any("replaced" in line for line in said)
    assert first[1] != second[1]
    assert second[0].ca.read_bytes() == parse_authority(document, time.time()).certificate


def test_an_agent_that_is_started_again_keeps_the_certificate_that_its_member_runs_with(tmp_path):
    async def scenario():
        own = node(tmp_path, "algo-1", [])
        files, token = await own.obtain(again=False)
        before = files.cert.read_bytes()
        assert await own.obtain(again=True) == (files, token)
        assert files.cert.read_bytes() == before
        await own.obtain(again=False)
        assert files.cert.read_bytes() != before

    asyncio.run(scenario())


class Told:
    """Members that note when they are to start again."""

    def __init__(self) -> None:
        self.restarted = asyncio.Event()

    async def restart(self) -> None:
        self.restarted.set()


def test_a_node_that_is_not_believed_reads_the_authority_again(tmp_path, monkeypatch):
    monkeypatch.setattr("keepstep.app.trust._LOOK_S", 0.1)

    async def scenario(server, own):
        coordinator = EtcdCoordinator([server.endpoint], tls=tls_files(own.folder), timeout_s=15.0)
        members = Told()
        keeping = asyncio.create_task(own.keep(coordinator, members))
        try:
            with pytest.raises(CoordinatorUnavailable):
                await coordinator.read("/keepstep/")
            await asyncio.wait_for(members.restarted.wait(), 60)
            await coordinator.read("/keepstep/")
        finally:
            keeping.cancel()
            await coordinator.close()

    own = node(tmp_path, "algo-1", [])
    asyncio.run(own.obtain(again=False))
    (document,) = (tmp_path / "store").rglob("authority.json")
    newer = make_authority("job", time.time())
    document.write_text(newer.document())  # as where another host had found the first one unfit
    (tmp_path / "etcd").mkdir()
    with EtcdServer(tmp_path / "etcd", tls=make_tls(tmp_path / "server", newer)) as server:
        asyncio.run(scenario(server, own))
    assert read_files(own.folder, time.time()) == newer.fingerprint
