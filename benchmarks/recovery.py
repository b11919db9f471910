"""How soon training goes on after a worker was killed: from the SIGKILL to the first step completed after it.

keepstep with a standby and without, torchrun, and a loop that starts a TensorFlow script again; two workers each, the
same size of state. In turns, some kills at a time, so that the i-th kills of all make a pair. The last line of the
output is one JSON object. README.md says how to read it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from keepstep.app.summary import read_run

ROOT = Path(__file__).resolve().parents[1]
JOB, TORCH_JOB = ROOT / "benchmarks" / "recovery_job.py", ROOT / "benchmarks" / "recovery_torch.py"
SYSTEMS = ("standby", "cold", "torchrun", "plain")
TO_TORCHRUN_MAX, TO_PLAIN_MAX, DETECT_S_MAX, RESTORE_S_MAX = 0.6, 0.3, 0.020, 0.3
EVERY = 100
"""Steps between the checkpoints of those who write them while they train."""
TRAINS_S = (6.0, 9.0)
"""How long training goes on between two kills, at least and at most."""
PATIENCE_S = 120.0
FOR_TORCHRUN = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Else its workers meet in the agent's store, find the addresses of those that were killed, and hang now and then."""
POLL_S = 0.002


class Run:
    """A system that trains in a folder of its own."""

    def __init__(self, system: str, options: argparse.Namespace, folder: Path) -> None:
        self.system, self.folder = system, folder
        self._gone: set[int] = set()
        folder.mkdir()
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "runtime"), "TF_CPP_MIN_LOG_LEVEL": "2"} | FOR_TORCHRUN
        with (folder / "output").open("wb") as output:
            self._process = subprocess.Popen(
                command_of(system, options, folder), env=environment, cwd=ROOT, stdout=output, stderr=output
            )

    def newest(self, rank: int) -> tuple[int, int, float]:
        """Pid, step and second of a rank's newest step; zeros before the first."""
        with suppress(OSError), (self.folder / f"steps-{rank}").open("rb") as told:
            told.seek(0, os.SEEK_END)
            told.seek(max(0, told.tell() - 200))
            lines = told.read().split(b"\n")[:-1]
            if lines:
                pid, step, at = lines[-1].split()
                return int(pid), int(step), float(at)
        return 0, 0, 0.0

    def wait_for(self, look: Callable[[], Any], what: str) -> Any:
        until = time.monotonic() + PATIENCE_S
        while not (found := look()):
            if self._process.poll() is not None or time.monotonic() > until:
                tail = (self.folder / "output").read_text(errors="replace")[-3000:]
                raise SystemExit(f"{self.system}: no {what}\n{tail}")
            time.sleep(POLL_S)
        return found

    def kill_one(self, rank: int) -> float:
        """Kill a worker; seconds until a step is completed by one that was started since.

        Waits until both ranks have made a step since the last kill.
        """
        before = self.wait_for(self._trains, "step of both ranks")
        victim, self._gone = self.newest(rank)[0], before
        killed = time.monotonic()
        os.kill(victim, signal.SIGKILL)

        def first_step() -> float:
            found = [self.newest(each) for each in range(2)]
            return min((at for pid, _, at in found if pid and pid not in before and at > killed), default=0.0)

        return float(self.wait_for(first_step, "step after the kill")) - killed

    def _trains(self) -> set[int] | None:
        """Pids of a world that both ranks have made a step in; None while there is none."""
        pids = {self.newest(rank)[0] for rank in range(2)}
        there = all(pid and pid not in self._gone and Path(f"/proc/{pid}").exists() for pid in pids)
        return pids if there and len(pids) == 2 else None

    def end(self) -> None:
        terminate(self._process)


def terminate(process: subprocess.Popen[bytes]) -> None:
    """Have a job end, and wait for it."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def command_of(system: str, options: argparse.Namespace, folder: Path) -> list[str]:
    common = ["--bytes", str(options.bytes), "--every", str(EVERY), "--folder", str(folder)]
    common += ["--step", str(options.step)]
    if system == "torchrun":
        launcher = [str(options.torch), "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2"]
        return [*launcher, "--max-restarts=1000", "--standalone", str(TORCH_JOB), *common]
    if system == "plain":
        loop = [sys.executable, "-m", "benchmarks.recovery_loop", str(options.python)]
        return [*loop, str(JOB), "--mode", "plain", *common]
    settings = [f"launch.standby={int(system == 'standby')}", "restart.budget=1000 per 1h", "restart.ceiling=1000"]
    words = [word for each in settings for word in ("--set", each)]
    local = [sys.executable, "-m", "keepstep", "local", "--quiet", "--hosts", "2", "--store", str(folder / "store")]
    places = ["--python", str(options.python), "--out", str(folder / "run")]
    return [*local, *words, *places, str(JOB), "--mode", "keepstep", *common]


def block(system: str, options: argparse.Namespace, folder: Path, draw: random.Random, kills: int) -> dict[str, Any]:
    """Some kills in one run: the seconds of each, and what keepstep's journals say of the phases."""
    run = Run(system, options, folder)
    try:
        run.wait_for(lambda: all(run.newest(rank)[1] > 0 for rank in range(2)), "first step")
        seconds = []
        for _ in range(kills):
            time.sleep(draw.uniform(*TRAINS_S))
            run.wait_for(lambda: all(time.monotonic() - run.newest(rank)[2] < 1.0 for rank in range(2)), "training")
            seconds.append(run.kill_one(draw.randrange(2)))
            print(f"{system}: {seconds[-1]:.3f} s", flush=True)
    finally:
        run.end()
    return {"seconds": seconds, "phases": phases_of(folder / "run") if system in ("standby", "cold") else []}


def phases_of(folder: Path) -> list[dict[str, float]]:
    """Of each recovery the phases as the host saw them that was the last to train on; noticed it has the first one."""
    by_host: dict[str, list[dict[str, float]]] = {}
    for each in sorted(read_run(folder).recoveries, key=lambda recovery: recovery.ended_at):
        by_host.setdefault(each.host, []).append(each.phases)
    found = []
    for seen in zip(*by_host.values(), strict=True):
        last = max(seen, key=lambda phases: phases["total"])
        found.append({**last, "detect": min(phases["detect"] for phases in seen)})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", type=Path, required=True, help="a Python that has TensorFlow")
    parser.add_argument("--torch", type=Path, required=True, help="a Python that has torch")
    parser.add_argument("--bytes", type=int, default=100_000_000)
    parser.add_argument("--step", type=float, default=0.05, help="seconds of a step")
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--kills", type=int, default=5, help="in each block")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    options.python, options.torch = options.python.absolute(), options.torch.absolute()
    seconds: dict[str, list[float]] = {system: [] for system in options.systems}
    phases: dict[str, list[dict[str, float]]] = {system: [] for system in options.systems}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        for number in range(options.blocks):
            for system in options.systems:
                draw = random.Random(f"{options.seed} {number}")  # the same kills for all
                found = block(system, options, Path(name) / f"{system}-{number}", draw, options.kills)
                seconds[system] += found["seconds"]
                phases[system] += found["phases"]
    report(options, seconds, phases)
    return 0


def report(
    options: argparse.Namespace, seconds: dict[str, list[float]], phases: dict[str, list[dict[str, float]]]
) -> None:
    for system, each in seconds.items():
        print(f"{system:9}: median {statistics.median(each):.3f} s, worst {max(each):.3f} s")
    means = {
        system: {name: round(statistics.fmean(one[name] for one in each), 4) for name in each[0]}
        for system, each in phases.items()
        if each
    }
    ratios = {
        other: statistics.median(mine / theirs for mine, theirs in zip(seconds["standby"], seconds[other], strict=True))
        for other in options.systems
        if other != "standby" and "standby" in seconds
    }
    detect_s = max((one["detect"] for each in phases.values() for one in each), default=0.0)
    goals = {"torchrun": TO_TORCHRUN_MAX, "plain": TO_PLAIN_MAX}
    restore_s = statistics.median(one["restore"] for one in phases["standby"]) if phases.get("standby") else 0.0
    reached = all(ratios[other] <= most for other, most in goals.items() if other in ratios)
    reached = reached and detect_s <= DETECT_S_MAX and restore_s <= RESTORE_S_MAX
    print(
        json.dumps(
            {
                "name": "recovery",
                "value": {other: round(ratio, 3) for other, ratio in ratios.items()},
                "goal": {**goals, "detect_s": DETECT_S_MAX, "restore_s": RESTORE_S_MAX},
                "ok": reached,
                "detect_s": detect_s,
                "restore_s": restore_s,
                "phases_s": means,
                "seconds": {system: [round(one, 4) for one in each] for system, each in seconds.items()},
                "bytes": options.bytes,
                "load_average": os.getloadavg()[0],
            }
        )
    )


if __name__ == "__main__":
    raise SystemExit(main())
