"""Each fault of a GPU, from NVML's real bindings to the end of the job: verdict and response as README.md has them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from keepstep.adapters.journal import read_lines
from keepstep.app.replay import journals_under
from keepstep.kernel import is_alive
from tests.support.scripted_nvml import Script, build

ROOT = Path(__file__).resolve().parents[2]
MARK = "KEEPSTEP_TEST_MARK"
DEADLINE_S = 120.0
FOREVER = "1000000"
SETTINGS = (
    "health.gpu.poll=500ms", "checkpoint.snapshot_every=20 steps", "checkpoint.every=1h", "launch.standby=0",
    "coordination.lease=10s",
)  # fmt: skip
WRAP = """sh -c 'NVML_SCRIPT="$SCRIPTS/${7##*/}" exec "$@"' sh"""
"""What a host is started by, whose base directory bears its name: each has a driver of its own."""

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml"))


def records_in(event: dict[str, Any]) -> list[dict[str, Any]]:
    """The records that an event brings: one or several that were written, or all that stood when the host came."""
    if event["kind"] == "cluster_read":
        return [record for record, _ in event["records"]]
    changes = event.get("changes", (event,))
    return [change["record"] for change in changes if change["kind"] in ("record_put", "record_seen")]


class Job:
    """Hosts on this machine that train without TensorFlow, each with one GPU of which the test says what it answers."""

    def __init__(self, folder: Path, library: Path, hosts: int, settings: Sequence[str] = (), last_step: str = FOREVER):
        self.folder, self.hosts = folder, [f"algo-{number}" for number in range(1, hosts + 1)]
        (folder / "scripts").mkdir(parents=True, exist_ok=True)
        self.gpus = {host: Script(folder / "scripts" / host, f"GPU-{host}") for host in self.hosts}
        overrides = [word for setting in (*SETTINGS, *settings) for word in ("--set", setting)]
        self._words = [
            *(sys.executable, "-m", "keepstep", "local", "--quiet", "--hosts", str(hosts), "--python", sys.executable),
            *("--out", str(folder), "--store", str(folder / "store"), "--wrap", WRAP, *overrides),
            *(str(ROOT / "tests" / "support" / "lockstep_job.py"), str(folder), last_step, "0.02"),
        ]
        self._environment = {
            **{"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT / "runtime"), MARK: str(folder)},
            **{"LD_LIBRARY_PATH": str(library), "SCRIPTS": str(folder / "scripts")},
        }

    def __enter__(self) -> Job:
        with (self.folder / "output").open("wb") as output:
            self.process = subprocess.Popen(
                self._words, env=self._environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
        return self

    def __exit__(self, *_: object) -> None:
        for pid in (self.process.pid, *self.left()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(DEADLINE_S)

    def wait_for(self, look: Callable[[], Any], what: str) -> Any:
        give_up = time.monotonic() + DEADLINE_S
        while True:
            ended, found = self.process.poll() is not None, look()
            if found:
                return found
            assert not ended, f"ended before {what}: {self.told()}"
            assert time.monotonic() < give_up, f"no {what}: {self.told()}"
            time.sleep(0.05)

    def trains(self) -> int:
        """Wait until there is a snapshot of one step on all hosts, and their GPUs were seen; returns that step."""
        for host in self.hosts:
            self.wait_for(lambda host=host: "gpus_sampled" in self.kinds(host), f"GPU of {host}")
        return int(self.wait_for(self.sealed_by_all, "snapshot on all hosts"))

    def sealed_by_all(self) -> int:
        """The newest step that is sealed in one of three slabs on each host, which may leave out what others seal."""
        newest = [
            {turn["event"]["seal"]["step"] for turn in self.turns(host) if turn["event"]["kind"] == "snapshot_sealed"}
            for host in self.hosts
        ]
        return max(set.intersection(*(set(sorted(steps)[-3:]) for steps in newest)), default=0)

    def goes_on(self, steps: int = 60) -> None:
        """Wait until so many more steps are done."""
        target = self.step() + steps
        self.wait_for(lambda: self.step() >= target, f"step {target}")

    def ends(self) -> int:
        """The exit code; that nothing is left is asserted."""
        try:
            code = self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end: {self.told()}") from None
        assert self.left() == [], self.told()
        return code

    # --- what it has left --------------------------------------------------------------------------------------------

    def turns(self, host: str) -> list[dict[str, Any]]:
        folder = self.folder / "hosts" / host / "output" / "data" / "keepstep" / host
        return [line for path in journals_under(folder) for _, line in read_lines(path) if "event" in line]

    def kinds(self, host: str) -> list[str]:
        return [turn["event"]["kind"] for turn in self.turns(host)]

    def started(self, host: str) -> list[dict[str, Any]]:
        """The turns in which a worker had started."""
        return [turn for turn in self.turns(host) if turn["event"]["kind"] == "worker_started"]

    def notes(self, host: str, reason: str) -> list[str]:
        """What the host said for this reason."""
        return [detail for turn in self.turns(host) for why, detail in turn["notes"] if why == reason]

    def step(self) -> int:
        sampled = [turn["event"] for turn in self.turns("algo-1") if turn["event"]["kind"] == "steps_sampled"]
        return max((event["completed"] for event in sampled), default=0)

    def generation(self, host: str = "algo-1") -> dict[str, Any]:
        """The newest generation that the host knows of."""
        found = [
            record
            for turn in self.turns(host)
            for record in records_in(turn["event"])
            if record["kind"] == "generation"
        ]
        return found[-1] if found else {"number": 0, "phase": "", "members": []}

    def members(self) -> list[str]:
        return [member[0] for member in self.generation()["members"]]

    def failure(self, host: str) -> str:
        return (self.folder / "hosts" / host / "output" / "failure").read_text()

    def committed(self) -> int:
        head = next((self.folder / "store").glob("*/HEAD.json"), None)
        return 0 if head is None else int(json.loads(head.read_text())["step"])

    def cordons(self) -> dict[str, str]:
        """What the store has as cordoned, and why, by `keepstep cordons`."""
        words = (sys.executable, "-m", "keepstep", "cordons", str(self.folder / "store"), "--json")
        told = subprocess.run(words, env=self._environment, check=True, capture_output=True, text=True).stdout
        return {entry["what"]: entry["why"] for entry in json.loads(told)["cordons"]}

    def metric(self, host: str, line: str) -> str | None:
        """What /metrics of the host shows, as `name{labels}`."""
        port = re.search(r"metrics on port (\d+)", self.log(host))
        if port is None:
            return None
        with urllib.request.urlopen(f"http://127.0.0.1:{port[1]}/metrics", timeout=30) as answer:
            shown = dict(each.rsplit(" ", 1) for each in answer.read().decode().splitlines() if each[:1] != "#")
        return shown.get(line)

    def log(self, host: str) -> str:
        path = self.folder / "hosts" / host / "log.txt"
        return path.read_text(errors="replace") if path.exists() else ""

    def told(self) -> str:
        return "\n".join([(self.folder / "output").read_text(), *(self.log(host)[-5000:] for host in self.hosts)])

    def left(self) -> list[int]:
        needle, found = f"{MARK}={self.folder}".encode(), []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if needle in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        return [pid for pid in found if is_alive(pid)]

    def probes(self, host: str) -> list[int]:
        """The host's probes that live."""
        found = []
        for pid in self.left():
            with contextlib.suppress(OSError):
                is_probe = b"keepstep.adapters.nvml" in Path(f"/proc/{pid}/cmdline").read_bytes()
                of_host = f"NVML_SCRIPT={self.folder}/scripts/{host}".encode()
                if is_probe and of_host in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    found.append(pid)
        return found


@pytest.fixture
def job(tmp_path: Path, library: Path) -> Iterator[Job]:
    with Job(tmp_path, library, 2) as job:
        yield job


FATAL: dict[str, tuple[Callable[[Script], None], str]] = {
    "a fatal Xid": (lambda gpu: gpu.xid(0, 79), "Xid 79, it has fallen off the bus"),
    "uncorrectable ECC": (lambda gpu: gpu.answer(0, ecc_uncorrected=1), "1 memory errors that could not be corrected"),
    "row remap failed": (lambda gpu: gpu.answer(0, remap_failed=1), "a memory row could not be remapped"),
    "lost device": (lambda gpu: gpu.answer(0, lost=1), "the driver has lost it"),
    "recovery action": (lambda gpu: gpu.recovery(0, 2), "the driver wants it repaired: node reboot"),
    "hot": (lambda gpu: gpu.answer(0, temperature=97), "97 degrees Celsius"),
}


@pytest.mark.parametrize("name", FATAL)
def test_a_fault_has_what_is_sealed_committed_and_the_host_repaired(job, name):
    inflict, evidence = FATAL[name]
    sealed = job.trains()
    assert job.committed() == 0
    inflict(job.gpus["algo-2"])
    assert job.ends() == 76, job.told()
    committed = job.committed()
    assert committed >= sealed
    for host in job.hosts:
        text = job.failure(host)
        assert text.startswith("policy_stops: gpu_fault on algo-2 rank 1 at step "), text
        assert f"GPU-algo-2: {evidence}" in text and f"saved up to step {committed}" in text, text
    assert len(text) <= 1024
    (kept,) = job.cordons().items()
    assert kept[0] == "GPU-algo-2" and kept[1].startswith(evidence)


HARMLESS: dict[str, tuple[Callable[[Script], None], str | None, str, str]] = {
    "a Xid of the script's own": (
        lambda gpu: gpu.xid(0, 13), None, 'keepstep_gpu_xids_total{gpu="GPU-algo-2",xid="13"}', "1.0"
    ),
    "throttled": (
        lambda gpu: gpu.answer(0, throttle=0x40, clock=705), "clocks held down by hw thermal slowdown, 705 of 1980 MHz",
        'keepstep_gpu_throttled{gpu="GPU-algo-2",reason="hw_thermal_slowdown"}', "1.0",
    ),
    "an NVLink down": (
        lambda gpu: gpu.answer(0, links_down=1), "NVLinks down: 1",
        'keepstep_gpu_nvlinks_down{gpu="GPU-algo-2"}', "1.0",
    ),
    "NVLink errors": (
        lambda gpu: gpu.answer(0, field__52__0=9), "NVLink errors grow, 7 so far",
        'keepstep_gpu_nvlink_errors{gpu="GPU-algo-2"}', "9.0",
    ),
    "PCIe replays": (
        lambda gpu: gpu.answer(0, pcie_replays=12), "PCIe replays grow, 5 so far",
        'keepstep_gpu_pcie_replays{gpu="GPU-algo-2"}', "12.0",
    ),
    "corrected ECC": (
        lambda gpu: gpu.answer(0, ecc_corrected=1003), "corrected memory errors grow, 1000 so far",
        'keepstep_gpu_ecc_errors{gpu="GPU-algo-2",kind="corrected"}', "1003.0",
    ),
    "a repair that waits": (
        lambda gpu: gpu.answer(0, remap_pending=1), "a repair of its memory waits for a reset",
        'keepstep_gpu_repair_pending{gpu="GPU-algo-2"}', "1.0",
    ),
    "memory of others": (
        lambda gpu: gpu.answer(0, process__pid=os.getpid(), process__memory=3_000_000_000),
        "3.0 GB of its memory held by processes of others",
        'keepstep_gpu_foreign_memory_bytes{gpu="GPU-algo-2"}', "3e+09",
    ),
    "MIG": (  # of a GPU that is divided the driver does not tell what its parts do
        lambda gpu: gpu.answer(
            0, memory=None, processes=None, clock=None, clock_max=None, throttle=None, links=None, temperature=57
        ),
        None, 'keepstep_gpu_temperature_celsius{gpu="GPU-algo-2"}', "57.0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_no_fault_is_told_and_ends_nothing(job, name):
    inflict, strain, metric, value = HARMLESS[name]
    job.trains()
    inflict(job.gpus["algo-2"])
    job.wait_for(lambda: job.metric("algo-2", metric) == value, metric)
    if strain is not None:
        job.wait_for(lambda: any(strain in each for each in job.notes("algo-2", "strained")), strain)
    job.goes_on()
    if strain is None:
        assert not [each for each in job.notes("algo-2", "strained") if "GPU-algo-2" in each]
    assert (job.generation()["number"], job.cordons()) == (1, {})
    assert "worker_exited" not in job.kinds("algo-1") + job.kinds("algo-2")


def test_a_driver_that_hangs_delays_nobody_and_its_probe_comes_back(job):
    job.trains()
    (probe,) = job.wait_for(lambda: job.probes("algo-2"), "probe")
    job.gpus["algo-2"].hang("power")
    job.wait_for(lambda: "the GPU driver does not answer" in job.notes("algo-2", "strained"), "strain")
    job.goes_on()
    job.gpus["algo-2"].recover()
    job.wait_for(lambda: "gpu" in job.notes("algo-2", "strain_over"), "word of the driver")
    assert not is_alive(probe)
    (again,) = job.wait_for(lambda: job.probes("algo-2"), "another probe")
    job.goes_on()
    assert again != probe
    job.wait_for(lambda: job.metric("algo-2", 'keepstep_gpu_lost{gpu="GPU-algo-2"}') == "0.0", "metrics")
    assert job.generation()["number"] == 1
    for host in job.hosts:
        assert "lease_lost" not in job.kinds(host) and "worker_exited" not in job.kinds(host)
        assert [turn for turn in job.turns(host) if "lease_expired" in dict(turn["notes"])] == []


def test_a_probe_that_was_killed_comes_back(job):
    job.trains()
    (probe,) = job.wait_for(lambda: job.probes("algo-2"), "probe")
    os.kill(probe, signal.SIGKILL)
    job.wait_for(lambda: job.probes("algo-2") not in ([], [probe]), "another probe")
    job.gpus["algo-2"].answer(0, temperature=66)
    metric = 'keepstep_gpu_temperature_celsius{gpu="GPU-algo-2"}'
    job.wait_for(lambda: job.metric("algo-2", metric) == "66.0", metric)
    assert job.generation()["number"] == 1


SPARED = ("elastic.hosts.min=2", "failures=[{cause: gpu_fault, respond: restart}]", "elastic.wait_for_return=10s")


def test_a_spare_takes_the_place_of_a_host_whose_gpu_has_a_fault(tmp_path, library):
    with Job(tmp_path, library, 3, (*SPARED, "elastic.spares=1")) as job:
        job.wait_for(lambda: job.generation()["phase"] == "ready", "world")
        first = job.members()
        (spare,) = set(job.hosts) - set(first)
        for host in first:
            job.wait_for(lambda host=host: "snapshot_sealed" in job.kinds(host), f"snapshot on {host}")
            job.wait_for(lambda host=host: "gpus_sampled" in job.kinds(host), f"GPU of {host}")
        sick = next(host for host in first if host != "algo-1")
        job.gpus[sick].xid(0, 95)
        wanted = sorted({*first, spare} - {sick})
        job.wait_for(lambda: job.generation()["phase"] == "ready" and sorted(job.members()) == wanted, "world")
        job.wait_for(lambda: "first_step_completed" in job.kinds(spare), f"step on {spare}")
        assert job.generation()["root"]["cause"] == "gpu_fault"
        assert list(job.cordons()) == [f"GPU-{sick}"]


def test_where_the_job_can_do_without_a_host_it_does_and_the_next_run_knows(tmp_path, library):
    with Job(tmp_path, library, 3, SPARED) as job:
        job.trains()
        job.gpus["algo-3"].xid(0, 95)
        job.wait_for(lambda: job.generation()["phase"] == "ready" and job.members() == ["algo-1", "algo-2"], "world")
        job.goes_on()
        assert job.generation()["root"]["cause"] == "gpu_fault"
        assert job.cordons() == {"GPU-algo-3": "Xid 95, a memory error that was not contained"}
        words = (sys.executable, "-m", "keepstep", "status", "--json", "--at", str(tmp_path))
        status = json.loads(subprocess.run(words, capture_output=True, check=True, env=job._environment).stdout)
        assert [row["host"] for row in status["hosts"] if "cordoned" in row["marks"]] == ["algo-3"]
    with Job(tmp_path, library, 3, SPARED) as job:
        job.gpus["algo-1"].answer(0, uuid="GPU-algo-3")  # names move to other hardware
        job.gpus["algo-3"].answer(0, uuid="GPU-algo-1")
        job.wait_for(lambda: job.notes("algo-1", "host_cordoned"), "cordon")
        job.wait_for(lambda: job.generation()["phase"] == "ready" and job.members() == ["algo-2", "algo-3"], "world")
        assert "GPU-algo-3 is cordoned by health: Xid 95" in job.notes("algo-1", "host_cordoned")[0]
        words = (sys.executable, "-m", "keepstep", "uncordon", "algo-1", "--at", str(tmp_path))
        subprocess.run(words, check=True, env=job._environment)
        job.wait_for(lambda: job.cordons() == {}, "an empty list")


def test_the_next_worker_waits_for_the_memory_that_the_last_one_held(tmp_path, library):
    def is_given_up() -> bool:  # nor is it waited for where the probe stands still
        return any(text in job.log("algo-2") for text in ("does not wait any longer", "memory is not waited for"))

    with Job(tmp_path, library, 2) as job:
        job.trains()
        job.gpus["algo-2"].answer(0, memory=20 << 30)  # the driver has not taken it back yet
        os.kill(job.started("algo-2")[0]["event"]["pid"], signal.SIGKILL)
        job.wait_for(lambda: "memory: 14.8 GiB of GPU-algo-2 still held" in job.log("algo-2"), "word of it")
        job.wait_for(lambda: len(job.started("algo-1")) == 2, "the other host's worker")
        assert len(job.started("algo-2")) == 1 or is_given_up()
        free_at = time.time()
        job.gpus["algo-2"].answer(0, memory=5 << 30)
        job.wait_for(lambda: len(job.started("algo-2")) == 2, "worker")
        job.goes_on()
        assert is_given_up() or job.started("algo-2")[1]["now"] >= free_at
        assert "still held" not in job.log("algo-1")


def test_a_job_that_can_not_do_without_a_cordoned_host_begins_nothing(tmp_path, library):
    with Job(tmp_path, library, 2) as job:
        job.trains()
        job.gpus["algo-2"].xid(0, 48)
        assert job.ends() == 76
        committed = job.committed()
    with Job(tmp_path, library, 2) as job:
        assert job.ends() == 76, job.told()
        assert "GPU-algo-2 is cordoned by health: Xid 48" in job.failure("algo-1")
        assert job.committed() == committed
    words = (sys.executable, "-m", "keepstep", "cordons", str(tmp_path / "store"), "--lift", "GPU-algo-2")
    subprocess.run(words, check=True, env=job._environment)
    with Job(tmp_path, library, 2, last_step=str(committed + 20)) as job:
        assert job.ends() == 0, job.told()
