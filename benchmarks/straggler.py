"""Who is slow, and of what: real ranks slowed down in their processor or their data, and some that are not.

Two ranks, each with one thread on a core of its own. In a run of `compute` one of them gets a quota of its core's time
by a control group, in one of `data` its batches take longer to read than a step (less would be hidden behind it), in
one of `neighbour` none is slow, and something else runs on one of the cores now and then. Prints a table of what was
done and what was said. Then, with batches of `run.dataset` and one rank at half speed: how long a step takes with equal
parts, and with those that `straggler.respond: rebalance` gives. The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.journals import Journals
from benchmarks.recovery import terminate

ROOT = Path(__file__).resolve().parents[1]
JOB = ROOT / "benchmarks" / "straggler_job.py"
SLOW, HOSTS = 1.6, 2
SETTLED_STEPS, NAMED_WITHIN, QUIET_STEPS, REBALANCE_STEPS = 40, 100, 500, 100
REBALANCED_MAX = 0.8
PERIOD_US, QUOTA_MIN_US = 5_000, 1_000
"""How long the periods of a quota are; Linux takes no quota that is smaller."""
PATIENCE_S, POLL_S, RECENT = 120.0, 0.05, 8
_FOUND = re.compile(r"(\S+) rank (\d+) works .*?: (\w+) takes")
_GROUPS = Path("/sys/fs/cgroup")
HOWS = ("loop", "fit", "legacy")
KINDS = ("compute", "data", "neighbour")


class Said(NamedTuple):
    """What was said of a run, after so many steps: rank and part, -1 and `nobody` where nobody was a straggler."""

    rank: int
    part: str
    steps: int


class Run:
    """A job that trains until it is told to stop, and what its leader says.

    `sampled` has generation, newest step and seconds of a step, as they were sampled.
    """

    def __init__(self, folder: Path, python: Path | str, how: str, knobs: tuple[str, ...] = ()) -> None:
        self.folder = folder
        self.step = 0
        self.found: list[Said] = []
        self.generation = 0
        self.steps_of_a_batch = HOSTS if how in ("fit", "legacy") else 1
        """`fit` takes batches as global ones, and has each rank make as many steps of one as there are ranks."""
        self.ready: set[str] = set()
        """Hosts whose standby for this generation is there: until then its import takes part of the processor."""
        self.sampled: list[tuple[int, int, float]] = []
        self._splits = [deque[dict[str, float]](maxlen=RECENT) for _ in range(HOSTS)]
        self.on_look: Callable[[], None] = lambda: None
        self._journals = Journals(folder / "run" / "hosts")
        command = [
            *(sys.executable, "-m", "keepstep", "local", "--quiet", "--hosts", str(HOSTS)),
            *(word for knob in knobs for word in ("--set", knob)),
            *("--python", str(python), "--out", str(folder / "run")),
            *(str(JOB), "--folder", str(folder), "--how", how),
        ]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "runtime"), "TF_CPP_MIN_LOG_LEVEL": "2"}
        with (folder / "output").open("wb") as output:
            self._process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)

    def look(self) -> None:
        """Take in what the journals have told since the last look."""
        for host, turn in self._journals.news():
            self._hear(host, turn)
        self.on_look()

    def _hear(self, host: str, turn: dict[str, Any]) -> None:
        event = turn.get("event", {})
        if event.get("kind") == "steps_sampled":
            self.step = max(self.step, event["completed"])
            self.sampled.append((self.generation, event["completed"], float(event["step_s"])))
            self._splits[int(host.rpartition("-")[2]) - 1] += event.get("splits", ())
        elif event.get("kind") == "record_put" and event["record"]["kind"] == "generation":
            if event["record"]["number"] != self.generation:
                self.generation, self.ready = event["record"]["number"], set()
        elif event.get("kind") == "standby_ready":
            self.ready.add(host)
        for reason, text in turn.get("notes", ()):
            if reason == "straggler_found" and (told := _FOUND.match(text)):
                self.found.append(Said(int(told[2]), told[3], self.step))

    def wait_for(self, look: Callable[[], Any], what: str, limit_s: float = PATIENCE_S) -> Any:
        until = time.monotonic() + limit_s
        while True:
            self.look()
            if found := look():
                return found
            if self._process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"no {what}\n{(self.folder / 'output').read_text(errors='replace')[-3000:]}")
            time.sleep(POLL_S)

    def usual_s(self, rank: int) -> float:
        """What a step would take by now, were this rank as fast as the other: that one's work, and what this one waits.

        By the newest of what was sampled; 0 where that is nothing.
        """
        own, other = self._splits[rank], self._splits[1 - rank]
        if not own or not other:
            return 0.0
        works = [each["data_s"] + each["compute_s"] + each["rest_s"] for each in other]
        return statistics.median(works) + statistics.median(each["wait_s"] for each in own)

    def pid(self, rank: int) -> int:
        """Of a rank's worker."""
        return int((self.folder / f"pid-{rank}").read_text())

    def end(self) -> None:
        terminate(self._process)


class Quota:
    """A control group of which the processes have a share of one core's time."""

    def __init__(self, pid: int, share: float) -> None:
        unified = (_GROUPS / "cgroup.controllers").exists()
        self._folder = (_GROUPS if unified else _GROUPS / "cpu") / f"keepstep-{os.getpid()}-{pid}"
        self._folder.mkdir()
        period_us = max(PERIOD_US, round(QUOTA_MIN_US / share))
        quota_us = round(share * period_us)
        if unified:
            (self._folder / "cpu.max").write_text(f"{quota_us} {period_us}")
        else:
            (self._folder / "cpu.cfs_period_us").write_text(str(period_us))
            (self._folder / "cpu.cfs_quota_us").write_text(str(quota_us))
        self.take(pid)

    def take(self, pid: int) -> None:
        """Have one more process in it."""
        (self._folder / "cgroup.procs").write_text(str(pid))

    def open(self) -> None:
        """Give the group back once nobody is in it."""
        with suppress(OSError):
            self._folder.rmdir()


class Neighbour:
    """Something that wants a core now and then: bursts of 0.2 to 1 s, 3 to 12 s apart."""

    def __init__(self, draw: random.Random) -> None:
        self._draw, self._over = draw, threading.Event()
        self._thread = threading.Thread(target=self._live)
        self._thread.start()

    def _live(self) -> None:
        while not self._over.wait(self._draw.uniform(3.0, 12.0)):
            core, seconds = self._draw.choice(sorted(os.sched_getaffinity(0))), self._draw.uniform(0.2, 1.0)
            burn = (
                f"import os,time;os.sched_setaffinity(0,{{{core}}});e=time.time()+{seconds}\nwhile time.time()<e:pass"
            )
            subprocess.run([sys.executable, "-c", burn], check=True)

    def leave(self) -> None:
        self._over.set()
        self._thread.join()


def slow_down(run: Run, kind: str, rank: int, times: float) -> Callable[[], None]:
    """Have a rank compute so many times as long, or its data take so many steps; returns what clears up behind it."""
    calm = run.step
    run.wait_for(lambda: run.step >= calm + SETTLED_STEPS, "steps")
    if kind == "compute":
        return Quota(run.pid(rank), 1.0 / times).open
    run.on_look = lambda: delay(run, rank, times)
    return lambda: None


def delay(run: Run, rank: int, times: float) -> None:
    """Have a rank's batches take so many steps, as they are by now.

    A machine that others share is faster and slower within a run: what took 1.6 steps may be hidden behind one soon.
    """
    usual_s = run.usual_s(rank)
    if usual_s > 0.0:
        order = run.folder / "order"
        order.write_text(str(times * usual_s * run.steps_of_a_batch))
        order.rename(run.folder / f"data-{rank}")


def play(kind: str, rank: int, how: str, python: Path, seed: int) -> Said:
    """One run: what was said of it."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as after:
        run = Run(Path(name), python, how)
        after.callback(run.end)
        # the import of a standby slows both down: who is slow beside that is slow by less
        run.wait_for(lambda: run.step >= SETTLED_STEPS and len(run.ready) == HOSTS, "standbys")
        limit = NAMED_WITHIN
        if kind != "neighbour":
            after.callback(slow_down(run, kind, rank, SLOW))
        else:
            neighbour, limit = Neighbour(random.Random(seed)), QUIET_STEPS
            after.callback(neighbour.leave)
        begun = run.step
        run.wait_for(lambda: run.found or run.step >= begun + limit, "steps", PATIENCE_S + limit)
        said = run.found[0] if run.found else Said(-1, "nobody", run.step)
        run.end()
    return said._replace(steps=said.steps - begun)


def below(pid: int) -> list[int]:
    """A process and all that it has started."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [pid, *(each for child in path.read_text().split() for each in below(int(child)))]


def rebalance(rank: int, python: Path) -> float:
    """Seconds of a step with parts by weight over those with equal ones, one rank being at half speed.

    Both are taken while nothing else is done on the hosts: the import of a standby would take its share.
    """
    knobs = ("straggler.respond=rebalance", f"checkpoint.snapshot_every={REBALANCE_STEPS} steps")
    with tempfile.TemporaryDirectory() as name, ExitStack() as after:
        run = Run(Path(name), python, "divided", knobs)
        after.callback(run.end)
        run.wait_for(lambda: run.step >= SETTLED_STEPS and len(run.ready) == HOSTS, "standbys")
        agent = int(Path(f"/proc/{run.pid(rank)}/stat").read_text().rpartition(")")[2].split()[1])
        quota = Quota(agent, 0.5)
        after.callback(quota.open)
        for pid in below(agent)[1:]:
            quota.take(pid)
        begun = run.step
        run.wait_for(lambda: run.generation > 1, "rebalance")
        run.wait_for(lambda: run.generation > 1 and len(run.ready) == HOSTS, "standbys")
        turned = run.step
        run.wait_for(lambda: run.step >= turned + REBALANCE_STEPS, "steps")
        run.end()
    settled = [each for each in run.sampled if each[0] == 1 and each[1] > begun + SETTLED_STEPS / 4]
    rebalanced = [each for each in run.sampled if each[0] > 1 and each[1] > turned]
    return statistics.median(s for *_, s in rebalanced) / statistics.median(s for *_, s in settled)


def is_right(kind: str, rank: int, said: Said) -> bool:
    if kind == "neighbour":
        return said.part == "nobody"
    return said[:2] == (rank, kind) and said.steps <= NAMED_WITHIN


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, required=True, help="a Python that has TensorFlow")
    parser.add_argument("--runs", type=int, default=20, help="of each kind")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--rebalances", type=int, default=5, help="runs with one rank at half speed")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    draw, before = random.Random(options.seed), os.getloadavg()[0]
    kinds = [kind for kind in options.kinds.split(",") if kind]
    table: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
    wrong: list[str] = []
    steps: list[int] = []
    for number in range(options.runs):
        for kind in kinds:
            rank, how = draw.randrange(2), HOWS[number % 3]
            said = play(kind, rank, how, options.python.absolute(), options.seed + number)
            right = is_right(kind, rank, said)
            table[kind]["right" if right else "wrong"] += 1
            table[kind][f"said {said.part}"] += 1
            steps += [said.steps] if right and kind != "neighbour" else []
            wrong += [] if right else [f"run {number}, {how}, {kind} on rank {rank}: {said}"]
            print(f"{how:4} {kind:9} rank {rank}: {said.part} on rank {said.rank} after {said.steps} steps", flush=True)
    ratios = []
    for number in range(options.rebalances):
        ratios.append(round(rebalance(number % 2, options.python.absolute()), 3))
        print(f"rebalanced, rank {number % 2} at half speed: {ratios[-1]} of a step with equal parts", flush=True)
    slow = bool(ratios) and statistics.median(ratios) > REBALANCED_MAX
    for kind, counts in table.items():
        print(f"{kind:9}", ", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    print(json.dumps({
        "name": "straggler", "runs": options.runs, "ok": not wrong and not slow, "table": table, "wrong": wrong,
        "steps_to_name": sorted(steps), "goal_steps": NAMED_WITHIN,
        "rebalanced": ratios, "goal_rebalanced": REBALANCED_MAX,
        "load_average": {"before": before, "after": os.getloadavg()[0]},
    }))  # fmt: skip
    return 1 if wrong or slow else 0


if __name__ == "__main__":
    sys.exit(main())
