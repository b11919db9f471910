"""Whose fault it was: random faults on random ranks of a job of three hosts, and what keepstep says of each.

An exception, an exit without one, a crash, a kill, a hang, memory beyond what a control group allows; the others get
whatever TensorFlow raises where a rank is gone. Prints a table; the last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.journals import Journals
from benchmarks.recovery import terminate
from keepstep.adapters.processes.host import AGE_S

ROOT = Path(__file__).resolve().parents[1]
JOB = ROOT / "benchmarks" / "attribution_job.py"
HOSTS = 3
NAMES = tuple(f"algo-{number}" for number in range(1, HOSTS + 1))
CAUSES = {
    "exception": "user_code", "exit": "user_code", "segfault": "killed", "kill": "killed", "hang": "hang",
    "memory": "out_of_memory",
}  # fmt: skip
SETTINGS = (
    "restart.budget=100000 per 1h", "restart.ceiling=10000", "restart.same_step=100", "hang.floor=2s", "hang.pause=3s",
    "failures=[{cause: any, respond: restart}]",
)  # fmt: skip
ROOM_BYTES = 256 << 20
PATIENCE_S, POLL_S = 120.0, 0.05
_TOLD = re.compile(r"(\w+) on (\S+) rank (\d+) ")
_DEADLINE = re.compile(r"for more than (\d+) s")
HANG_GOAL = 3.0
_GROUPS = Path("/sys/fs/cgroup")


class Job:
    """A job that trains until it is told to stop."""

    def __init__(self, folder: Path, python: Path) -> None:
        self.folder = folder
        self.verdicts: list[str] = []
        self.found: list[float] = []
        """Of each hang: from the last sign of life to the verdict, over the deadline that was learnt."""
        self._since: list[float] = []
        self._deadlines: list[float] = []
        self._judged_at = 0.0
        self._journals = Journals(folder / "run" / "hosts")
        self._worlds: Counter[str] = Counter()
        self._workers: dict[str, int] = {}
        words = [word for each in SETTINGS for word in ("--set", each)]
        command = [
            *(sys.executable, "-m", "keepstep", "local", "--quiet", "--hosts", str(HOSTS), *words),
            *("--store", str(folder / "store"), "--python", str(python), "--out", str(folder / "run")),
            *(str(JOB), "--folder", str(folder)),
        ]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "runtime"), "TF_CPP_MIN_LOG_LEVEL": "2"}
        with (folder / "output").open("wb") as output:
            self._process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)

    def look(self) -> None:
        """Take in what the journals have told since the last look."""
        for host, turn in self._journals.news():
            self._hear(host, turn)

    def _hear(self, host: str, turn: dict[str, Any]) -> None:
        event = turn.get("event", {})
        if event.get("kind") == "first_step_completed":
            self._worlds[host] += 1
        elif event.get("kind") == "worker_started":
            self._workers[host] = event["pid"]
        stall = event.get("stall") if event.get("kind") == "stacks_collected" else None
        if stall is not None and stall["since"] > self._judged_at:
            self._since.append(stall["since"])
        for reason, text in turn.get("notes", ()):
            if reason == "stacks_wanted":
                self._deadlines.append(float(_DEADLINE.search(text)[1]))
            elif reason == "restart_allowed":
                self.verdicts.append(text)
                if text.startswith("hang ") and self._since and self._deadlines:
                    self.found.append((turn["now"] - min(self._since)) / max(self._deadlines))
                self._since, self._deadlines, self._judged_at = [], [], turn["now"]

    def worlds(self) -> int:
        """How many generations have made a step on all hosts."""
        return min(self._worlds[name] for name in NAMES)

    def worker(self, rank: int) -> int:
        """Pid of the newest worker of a rank."""
        return self._workers[NAMES[rank]]

    def wait_for(self, look: Callable[[], Any], what: str) -> Any:
        until = time.monotonic() + PATIENCE_S
        while True:
            self.look()
            if found := look():
                return found
            if self._process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"no {what}\n{(self.folder / 'output').read_text(errors='replace')[-3000:]}")
            time.sleep(POLL_S)

    def end(self) -> None:
        terminate(self._process)


class Cage:
    """A control group in which a process may take only a little more memory than it has.

    What it has stays charged to the group that it comes from, so that the limit is what is new.
    """

    def __init__(self, pid: int) -> None:
        unified = (_GROUPS / "cgroup.controllers").exists()
        self._folder = (_GROUPS if unified else _GROUPS / "memory") / f"keepstep-{os.getpid()}-{pid}"
        self._folder.mkdir()
        limit = self._folder / ("memory.max" if unified else "memory.limit_in_bytes")
        limit.write_text(str(ROOM_BYTES))
        (self._folder / "cgroup.procs").write_text(str(pid))

    def open(self) -> None:
        """Give the group back once nobody is in it."""
        with suppress(OSError):
            self._folder.rmdir()


def inflict(job: Job, kind: str, rank: int) -> Cage | None:
    """Do it, or have it done."""
    pid, cage = job.worker(rank), None
    if kind == "memory":
        cage = Cage(pid)
        time.sleep(2 * AGE_S)  # nobody moves a process of a container's: its host looks now and then where it is
    if kind == "kill":
        os.kill(pid, signal.SIGKILL)
    else:
        order = job.folder / "order"
        order.write_text(kind)
        order.rename(job.folder / f"do-{rank}")
    return cage


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", type=Path, required=True, help="a Python that has TensorFlow")
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    right: Counter[tuple[str, int]] = Counter()
    wrong: list[str] = []
    drawn: Counter[tuple[str, int]] = Counter()
    with tempfile.TemporaryDirectory() as name:
        job = Job(Path(name), options.python.absolute())
        try:
            for number in range(options.faults):
                job.wait_for(lambda n=number: job.worlds() > n, f"world after {number} faults")
                time.sleep(draw.uniform(0.0, 1.0))  # somewhere in the training
                kind, rank = draw.choice(list(CAUSES)), draw.randrange(HOSTS)
                cage = inflict(job, kind, rank)
                verdict = job.wait_for(lambda n=number: job.verdicts[n:], f"verdict on {kind} of rank {rank}")[0]
                told = _TOLD.match(verdict)
                drawn[kind, rank] += 1
                if told is not None and (told[1], int(told[3])) == (CAUSES[kind], rank):
                    right[kind, rank] += 1
                else:
                    wrong.append(f"{kind} of rank {rank}: {verdict}")
                    print(wrong[-1], flush=True)
                if cage is not None:
                    cage.open()
        finally:
            job.end()
    print(f"{'':10}" + "".join(f"{f'rank {rank}':>12}" for rank in range(HOSTS)))
    for kind in CAUSES:
        print(f"{kind:10}" + "".join(f"{f'{right[kind, r]} of {drawn[kind, r]}':>12}" for r in range(HOSTS)))
    found = {"median": round(statistics.median(job.found), 2), "max": round(max(job.found), 2)} if job.found else {}
    in_time = not job.found or max(job.found) <= HANG_GOAL
    print(f"hangs found after {found} of the deadline, {len(job.found)} of them")
    print(json.dumps({
        "name": "attribution", "value": sum(right.values()), "goal": options.faults, "ok": not wrong and in_time,
        "wrong": wrong, "hang_found_over_deadline": found, "hang_goal": HANG_GOAL,
        "faults": {kind: sum(drawn[kind, rank] for rank in range(HOSTS)) for kind in CAUSES}, "seed": options.seed,
        "load_average": os.getloadavg()[0],
    }))  # fmt: skip
    return 0 if not wrong and in_time else 1


if __name__ == "__main__":
    raise SystemExit(main())
