"""A job on five hosts that is hurt every few seconds, and has to come to its end all the same.

`keepstep local` with real inits, agents, uploaders and etcd; the workers train without TensorFlow, so that a restart
costs them little and most of the time is keepstep's own. The last line of the output is one JSON object. README.md
beside this file says how to read it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keepstep import kernel
from keepstep.app.faults import command_of, kill_family, uploader_of

ROOT = Path(__file__).resolve().parents[1]
HOSTS = 5
SETTINGS = (
    "restart.budget=10000 per 1h", "restart.ceiling=10000", "restart.same_step=100", "elastic.hosts.min=3",
    "elastic.wait_for_return=4s", "coordination.lease=3s", "checkpoint.every=3s", "checkpoint.snapshot_every=5 steps",
)  # fmt: skip
PAUSE_S = 0.05
SHARE_TRAINED = 0.7
"""Of the time with faults, what is left for training; the job's last step is chosen by it."""
FROZEN_S = 6.0
CORDONED_S = 8.0
END_S = 240.0
_DRAWS = 5
DESCRIPTORS_MAX = 16
"""How many more descriptors a process may have at the end than soon after its start: slabs, connections, a watch."""


@dataclass
class Host:
    """One host as its journals tell of it."""

    name: str
    folder: Path
    agent: int = 0
    worker: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)
    _read: dict[bytes, int] = field(default_factory=dict)

    def look(self) -> None:
        """Take in what the journals say by now; a new agent begins a new file, and the old one is renamed."""
        for path in sorted((self.folder / "output" / "data" / "keepstep" / self.name).glob("journal*.jsonl")):
            with suppress(OSError), path.open("rb") as file:
                head = file.readline()  # says whose journal it is; names and inodes are used again
                if not head.endswith(b"\n"):
                    continue
                file.seek(self._read.get(head, 0))
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._read[head] = self._read.get(head, 0) + len(line)
                    self._take(json.loads(line))

    def _take(self, line: dict[str, Any]) -> None:
        if "pid" in line:
            self.agent, self.worker = int(line["pid"]), 0
        event = line.get("event")
        if event is None:
            return
        if event["kind"] == "worker_started":
            self.worker = int(event["pid"])
        elif event["kind"] == "worker_exited":
            self.worker = 0
        if event["kind"] in ("worker_exited", "first_step_completed", "checkpoint_committed"):
            self.events.append({"now": line["now"], **event})

    @property
    def init(self) -> int:
        """0 where there is none: an agent whose init has just died is for a moment the child of who knows whom."""
        parent = kernel.processes()[self.agent].parent if self.agent in kernel.processes() else 0
        return parent if parent and "-m keepstep train" in command_of(parent) else 0


class Run:
    """The job under way, and what is done to it."""

    def __init__(self, folder: Path, seed: int, last_step: int) -> None:
        self.folder, self.random = folder, random.Random(seed)
        self.hosts = [Host(f"algo-{n}", folder / "hosts" / f"algo-{n}") for n in range(1, HOSTS + 1)]
        self.later: list[tuple[float, Callable[[], None]]] = []
        self.inflicted: list[tuple[str, float]] = []
        self.descriptors: dict[int, list[int]] = {}
        script = ROOT / "tests" / "support" / "lockstep_job.py"
        words = [
            *(sys.executable, "-m", "keepstep", "local", "--quiet", "--hosts", str(HOSTS), "--python", sys.executable),
            *("--out", str(folder), *(word for setting in SETTINGS for word in ("--set", setting))),
            *(str(script), str(folder), str(last_step), str(PAUSE_S)),
        ]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "runtime"), "KEEPSTEP_SOAK": str(folder)}
        with (folder / "output").open("wb") as output:
            self.process = subprocess.Popen(
                words, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def look(self) -> None:
        """Take in journals and descriptors, and do what is due: wake the frozen, take back cordons."""
        for host in self.hosts:
            host.look()
        for due in [due for due in self.later if due[0] <= time.monotonic()]:
            self.later.remove(due)
            due[1]()

    def count_descriptors(self) -> None:
        """Note how many descriptors each init and agent has."""
        for host in self.hosts:
            for pid in {host.agent, host.init} - {0}:
                with suppress(OSError):
                    self.descriptors.setdefault(pid, []).append(len(os.listdir(f"/proc/{pid}/fd")))

    def hurt(self) -> None:
        """Do a random fault, the first one drawn that can be done now."""
        for _ in range(_DRAWS):
            kind, host, at = self.random.choice(list(FAULTS)), self.random.choice(self.hosts), time.time()
            if FAULTS[kind](self, host):
                self.inflicted.append((kind, at))
                print(f"{kind} on {host.name}", flush=True)
                return

    def operate(self, *words: str) -> bool:
        """An operator's command; it may come at a moment at which etcd does not answer."""
        words = (*words[:1], "--at", str(self.folder), *words[1:])
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "runtime")}
        done = subprocess.run(
            [sys.executable, "-m", "keepstep", *words], env=environment, capture_output=True, check=False
        )
        return done.returncode == 0


def kill(pid: int | None, number: int = signal.SIGKILL) -> bool:
    """Send a signal; False where there is nobody."""
    if not pid:
        return False
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def freeze_agent(run: Run, host: Host) -> bool:
    agent = host.agent
    run.later.append((time.monotonic() + FROZEN_S, lambda: kill(agent, signal.SIGCONT) and None))
    return kill(agent, signal.SIGSTOP)


def kill_host(run: Run, host: Host) -> bool:
    if not host.init:
        return False
    kill_family(host.init)
    return True


def kill_etcd(run: Run, host: Host) -> bool:
    init = host.init
    children = [pid for pid, process in kernel.processes().items() if init and process.parent == init]
    return kill(next((pid for pid in children if "etcd" in command_of(pid).split(" ")[0]), None))


def cordon(run: Run, host: Host) -> bool:
    run.later.append((time.monotonic() + CORDONED_S, lambda: _uncordon(run, host.name)))
    return run.operate("cordon", host.name)


def _uncordon(run: Run, name: str) -> None:
    if not run.operate("uncordon", name) and not run.ended:
        run.later.append((time.monotonic() + 1.0, lambda: _uncordon(run, name)))


FAULTS: dict[str, Callable[[Run, Host], bool]] = {
    "worker killed": lambda run, host: kill(host.worker),
    "agent killed": lambda run, host: kill(host.agent),
    "agent frozen": freeze_agent,
    "uploader killed": lambda run, host: kill(uploader_of(host.agent) if host.agent else None),
    "host killed": kill_host,
    "etcd killed": kill_etcd,
    "host cordoned": cordon,
    "restart ordered": lambda run, host: run.operate("restart"),
}


# --- figures ---------------------------------------------------------------------------------------------------------


def recoveries(run: Run) -> dict[str, list[float | None]]:
    """Seconds from each fault to the first step of the world that came after it; None where training just went on."""
    exits = sorted(event["now"] for host in run.hosts for event in host.events if event["kind"] == "worker_exited")
    steps = sorted(
        event["at"] for host in run.hosts for event in host.events if event["kind"] == "first_step_completed"
    )
    found: dict[str, list[float | None]] = {}
    for number, (kind, at) in enumerate(run.inflicted):
        until = run.inflicted[number + 1][1] if number + 1 < len(run.inflicted) else at + END_S
        struck = any(at <= when <= until for when in exits) or kind in ("host killed", "agent killed")
        after = next((when for when in steps if when > at), None)
        found.setdefault(kind, []).append(after - at if struck and after is not None else None)
    return found


def table(found: dict[str, list[float | None]]) -> str:
    lines = [f"{'fault':<16}  {'times':>5}  {'without a stop':>14}  {'recovery s, median':>18}  {'longest':>7}"]
    for kind, times in sorted(found.items()):
        known = [seconds for seconds in times if seconds is not None]
        median = f"{statistics.median(known):.2f}" if known else "-"
        longest = f"{max(known):.2f}" if known else "-"
        lines.append(f"{kind:<16}  {len(times):>5}  {len(times) - len(known):>14}  {median:>18}  {longest:>7}")
    return "\n".join(lines)


def leaks(run: Run) -> dict[str, Any]:
    """What should not be there once the job has ended: processes, descriptors, etcd's data."""
    needle = f"KEEPSTEP_SOAK={run.folder}".encode()
    processes = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            pid = int(path.parent.name)
            if needle in path.read_bytes().split(b"\0") and kernel.is_alive(pid):
                processes.append(f"{pid} {command_of(pid)[:80]}")
    growth = max((max(counts) - counts[0] for counts in run.descriptors.values() if len(counts) > 1), default=0)
    notes = [path.read_text() for path in run.folder.glob("hosts/*/scratch/etcd-data")]
    return {
        "processes": processes,
        "descriptors_grown_by": growth,
        "etcd_data": [note for note in notes if Path(note).exists()],
    }


def keys_in_etcd(run: Run) -> int:
    """How many records the job has in etcd just now; -1 where it does not answer."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "runtime")}
    words = [sys.executable, "-m", "keepstep", "status", "--json", "--at", str(run.folder)]
    done = subprocess.run(words, env=environment, capture_output=True, check=False)
    return int(json.loads(done.stdout)["records"]) if done.returncode == 0 else -1


def soak(run: Run, seconds: float, every_s: float) -> dict[str, Any]:
    """Hurt the job until time is up, then let it end; return all figures."""
    begun = time.monotonic()
    while not any(host.events for host in run.hosts) and not run.ended:
        run.look()
        time.sleep(0.2)
    hurt_at, most_keys = time.monotonic() + every_s, 0
    until = time.monotonic() + seconds
    while not run.ended and time.monotonic() < until:
        run.look()
        if time.monotonic() >= hurt_at:
            hurt_at += every_s
            run.count_descriptors()
            run.hurt()
            most_keys = max(most_keys, keys_in_etcd(run) if len(run.inflicted) % 10 == 9 else 0)
        time.sleep(0.05)
    patience = time.monotonic() + END_S
    while not run.ended and time.monotonic() < patience:
        run.look()
        time.sleep(0.1)
    run.look()
    found = recoveries(run)
    return {
        "exit_code": run.process.poll(),
        "seconds": time.monotonic() - begun,
        "faults": len(run.inflicted),
        "recovery_s": found,
        "most_keys": most_keys,
        "leaks": leaks(run) if run.ended else {},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "soak")
    parser.add_argument("--seconds", type=float, default=600.0, help="how long faults go on")
    parser.add_argument("--every", type=float, default=5.0, metavar="SECONDS", help="between two faults")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    folder = options.out.absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    last_step = int(options.seconds / PAUSE_S * SHARE_TRAINED)
    run = Run(folder, options.seed, last_step)
    try:
        found = soak(run, options.seconds, options.every)
    finally:
        if not run.ended:
            kill_family(run.process.pid)
    result = folder / "result.json"
    total = json.loads(result.read_text())["total"] if result.exists() else None
    wanted = last_step * (last_step + 1) // 2
    leaked = found["leaks"]
    whole = bool(leaked) and not leaked["processes"] and not leaked["etcd_data"]
    ok = found["exit_code"] == 0 and total == wanted and whole and leaked["descriptors_grown_by"] <= DESCRIPTORS_MAX
    print(table(found["recovery_s"]))
    last = {"name": "soak", "value": found["exit_code"], "goal": 0, "ok": ok, "last_step": last_step,
            "every_step_once": total == wanted, **found}  # fmt: skip
    print(json.dumps(last))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
