"""What keepstep costs: microseconds added to a 50 ms step, memory of init and agent, the agent's share of a core.

Two runs of `keepstep local`, with real agents: one host with a custom loop of 50 ms steps and 200 MB of state, whose
instrumentation is switched on and off in blocks; then two hosts with etcd between them. The last line of the output is
one JSON object. README.md beside this file says how to read it.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STEP_S = 0.050
RATIO_MAX = 0.01
PROBE_US_MAX = 100.0
INIT_PSS_BYTES_MAX = 15_000_000
AGENT_PSS_BYTES_MAX = 75_000_000
AGENT_CPU_RATIO_MAX = 0.01
WARM_UP_BLOCKS = 10
DRAWS = 10_000


class Local:
    """A `keepstep local` that is under way."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes]) -> None:
        self.folder, self._process = folder, process

    def wait_for(self, look: Callable[[], Any], what: str, limit_s: float) -> Any:
        """Wait until `look` gives something; ends the benchmark where the run ends before, or time is up."""
        until = time.monotonic() + limit_s
        while not (found := look()):
            if self._process.poll() is not None or time.monotonic() > until:
                tail = (self.folder / "output").read_text(errors="replace")[-2000:]
                raise SystemExit(f"no {what} within {limit_s:.0f} s:\n{tail}")
            time.sleep(0.05)
        return found

    def end(self) -> int:
        """Interrupt it, and wait."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(60)

    def journal(self, host: str) -> Path:
        return self.folder / "hosts" / host / "output" / "data" / "keepstep" / host / "journal.jsonl"

    def agent(self, host: str) -> int:
        """The pid of a host's agent, 0 before it has begun its journal."""
        path = self.journal(host)
        head = path.read_text().partition("\n")[0] if path.exists() else ""
        return int(json.loads(head)["pid"]) if head else 0

    def steps(self, host: str) -> int:
        """The newest step that a host's agent has sampled."""
        path, step = self.journal(host), 0
        for line in path.read_text().splitlines() if path.exists() else ():
            if '"kind":"steps_sampled"' in line and line.endswith("}"):
                step = int(json.loads(line)["event"]["completed"])
        return step


@contextmanager
def local(folder: Path, python: Path, hosts: int, *words: str) -> Iterator[Local]:
    """Start `keepstep local`; it is gone when the block ends, whatever happens."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "keepstep", "local", "--quiet", "--hosts", str(hosts)),
                *("--python", str(python), "--out", str(folder), *words),
            ],
            env={**os.environ, "PYTHONPATH": str(ROOT / "runtime")},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield Local(folder, process)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


# --- /proc -----------------------------------------------------------------------------------------------------------


def cpu_s(pid: int) -> float:
    """Seconds of CPU that a process has used, in user and system mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def pss_bytes(pid: int) -> int:
    """Proportional set size: private memory, and a share of what other processes have mapped as well."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"the kernel tells no PSS of process {pid}")


class Usage:
    """CPU time of processes over a while."""

    def __init__(self, pids: list[int]) -> None:
        self._begun_s, self._used_s = time.monotonic(), {pid: cpu_s(pid) for pid in pids}

    def ratios(self) -> tuple[float, list[float]]:
        """Seconds measured, and each process's share of a core."""
        seconds = time.monotonic() - self._begun_s
        return seconds, [(cpu_s(pid) - used_s) / seconds for pid, used_s in self._used_s.items()]


# --- the two runs ----------------------------------------------------------------------------------------------------


def measure_steps(folder: Path, python: Path, pairs: int, block: int) -> dict[str, Any]:
    """Blocks with and without instrumentation within one process; the agent's CPU meanwhile."""
    job = ROOT / "benchmarks" / "overhead_job.py"
    words = (str(job), f"--folder={folder}", f"--pairs={pairs}", f"--block={block}")
    limit_s = 60 + 4 * STEP_S * block * pairs
    with local(folder, python, 1, *words, f"--warm-up={WARM_UP_BLOCKS}", f"--step-s={STEP_S}") as run:
        run.wait_for((folder / "measuring").exists, "first block", limit_s)
        agent = run.agent("algo-1")
        usage = Usage([agent])
        run.wait_for((folder / "measured").exists, "last block", limit_s)
        _, ratios = usage.ratios()
        memory = {"agent_pss_bytes": pss_bytes(agent), "init_pss_bytes": pss_bytes(parent(agent))}
        run.wait_for((folder / "summary.json").exists, "end", 60)
    found: dict[str, Any] = json.loads((folder / "blocks.json").read_text())
    return {**found, **memory, "agent_cpu_ratio": ratios[0]}


def measure_hosts(folder: Path, python: Path, seconds: float) -> dict[str, Any]:
    """Memory and CPU of the inits and agents of two hosts that train together, etcd between them."""
    names = ("algo-1", "algo-2")
    with local(folder, python, 2, str(ROOT / "examples" / "digits_keras.py"), "--epochs=1000000") as run:
        run.wait_for(lambda: all(run.steps(name) >= 60 for name in names), "steps of two hosts", 150)
        agents = [run.agent(name) for name in names]
        before, usage = run.steps("algo-1"), Usage(agents)
        time.sleep(seconds)
        measured_s, ratios = usage.ratios()
        return {
            "seconds": measured_s,
            "steps": run.steps("algo-1") - before,
            "agent_cpu_ratio": ratios,
            "agent_pss_bytes": [pss_bytes(pid) for pid in agents],
            "init_pss_bytes": [pss_bytes(parent(pid)) for pid in agents],
            "exit_code": run.end(),
        }


# --- figures ---------------------------------------------------------------------------------------------------------


def mean_interval(values: list[float]) -> tuple[float, float, float]:
    """Mean, and the bounds within which 95 % of the means of as many values drawn from these lie."""
    draw = random.Random(1)
    means = sorted(statistics.fmean(draw.choices(values, k=len(values))) for _ in range(DRAWS))
    return statistics.fmean(values), means[int(0.025 * DRAWS)], means[int(0.975 * DRAWS)]


def difference_us(on: dict[str, Any], off: dict[str, Any]) -> tuple[float, float]:
    """What a block's instrumentation added to a step: to the usual step, and by snapshots and the steps after them."""
    touched = {int(at) + after for at in on["snapshot_ns"] for after in (0, 1)}
    usual_ns = statistics.median(ns for at, ns in enumerate(on["step_ns"]) if at not in touched)
    seals_ns = sum(ns - usual_ns for at, ns in enumerate(on["step_ns"]) if at in touched)
    return (usual_ns - statistics.median(off["step_ns"])) / 1e3, seals_ns / len(on["step_ns"]) / 1e3


def summarize_steps(found: dict[str, Any]) -> dict[str, Any]:
    """What instrumentation adds to a step, in microseconds: by the blocks' difference, and by what its calls took."""
    blocks = found["blocks"]
    pairs = [(a, b) if a["instrumented"] else (b, a) for a, b in zip(blocks[::2], blocks[1::2], strict=True)]
    parts = [difference_us(on, off) for on, off in pairs]
    probe_us, *probe_bounds_us = mean_interval([seconds * 1e6 for seconds in found["probe_s"]])
    differences = [usual + seal + probe_us for usual, seal in parts]
    on_blocks = [block for block in blocks if block["instrumented"]]
    own_ns = [ns for block in on_blocks for ns in block["own_ns"]]
    calls_ns = [
        ns for block in on_blocks for at, ns in enumerate(block["own_ns"]) if str(at) not in block["snapshot_ns"]
    ]
    snapshots_ns = [ns for block in on_blocks for ns in block["snapshot_ns"].values()]
    off_ns = [ns for block in blocks if not block["instrumented"] for ns in block["step_ns"]]
    added_us, low_us, high_us = mean_interval(differences)
    return {
        "added_us": added_us,
        "added_us_ci95": [low_us, high_us],
        "added_us_without_snapshots": statistics.fmean(usual for usual, _ in parts) + probe_us,
        "probe_us": probe_us,
        "probe_us_ci95": probe_bounds_us,
        "added_us_of_means": statistics.fmean(
            (statistics.fmean(on["step_ns"]) - statistics.fmean(off["step_ns"])) / 1e3 for on, off in pairs
        ),
        "calls_us": statistics.fmean(own_ns) / 1e3,
        "calls_us_without_snapshots_p50": statistics.median(calls_ns) / 1e3,
        "step_ms": statistics.fmean(off_ns) / 1e6,
        "step_ms_p50": statistics.median(off_ns) / 1e6,
        "blocks": len(blocks),
        "steps_in_a_block": len(blocks[0]["step_ns"]),
        "snapshots": len(snapshots_ns),
        "snapshots_skipped": found["skipped"],
        "snapshot_ms": statistics.fmean(snapshots_ns) / 1e6 if snapshots_ns else None,
        "snapshot_ms_max": max(snapshots_ns, default=0) / 1e6,
        "snapshot_every": found["snapshot_every"],
        "warm_up_snapshot_ms": [round(ns / 1e6, 1) for ns in found["warm_up_snapshot_ns"]],
        "state_bytes": found["state_bytes"],
        "variables": found["variables"],
        "agent_cpu_ratio": found["agent_cpu_ratio"],
        "agent_pss_bytes": found["agent_pss_bytes"],
        "init_pss_bytes": found["init_pss_bytes"],
        "block_differences_us": [round(difference, 1) for difference in differences],
    }


def report(steps: dict[str, Any], hosts: dict[str, Any], load: tuple[float, float]) -> dict[str, Any]:
    """The last line: the time added to a step is the value; `ok` wants every goal reached."""
    goals = [
        ("added_us", steps["added_us"], RATIO_MAX * STEP_S * 1e6),
        ("probe_us_ci95", steps["probe_us_ci95"][1], PROBE_US_MAX),
        ("init_pss_bytes", max(hosts["init_pss_bytes"]), INIT_PSS_BYTES_MAX),
        ("agent_pss_bytes", max(hosts["agent_pss_bytes"]), AGENT_PSS_BYTES_MAX),
        ("agent_cpu_ratio", max(hosts["agent_cpu_ratio"]), AGENT_CPU_RATIO_MAX),
    ]
    complete = bool(steps["snapshots"]) and hosts["steps"] > 0
    return {
        "name": "overhead",
        "value": round(steps["added_us"], 1),
        "unit": "microseconds added to a step of 50 ms, snapshots included",
        "goal": RATIO_MAX * STEP_S * 1e6,
        "ok": complete and all(value <= goal for _, value, goal in goals),
        "goals": {name: {"value": value, "goal": goal, "ok": value <= goal} for name, value, goal in goals},
        "one_host": steps,
        "two_hosts": hosts,
        "load_average": {"before": load[0], "after": load[1]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, required=True, help="an interpreter with TensorFlow")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench-overhead")
    parser.add_argument("--pairs", type=int, default=24, help="blocks with instrumentation, and as many without")
    parser.add_argument("--block", type=int, default=100, help="steps in a block")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long the two hosts are watched")
    options = parser.parse_args()
    python, out = options.python.absolute(), options.out.absolute()
    before = os.getloadavg()[0]
    steps = summarize_steps(measure_steps(out / "steps", python, options.pairs, options.block))
    print(
        f"one host: {steps['added_us']:.0f} us added to a step of {steps['step_ms']:.1f} ms "
        f"(95 %: {steps['added_us_ci95'][0]:.0f} to {steps['added_us_ci95'][1]:.0f}); {steps['snapshots']} snapshots "
        f"of {steps['state_bytes'] / 1e6:.0f} MB, {steps['snapshot_ms'] or 0:.1f} ms each, "
        f"one in {steps['snapshot_every']} steps",
        flush=True,
    )
    print(
        f"the probe, on and off in blocks: {steps['probe_us']:.0f} us a step "
        f"(95 %: {steps['probe_us_ci95'][0]:.0f} to {steps['probe_us_ci95'][1]:.0f})",
        flush=True,
    )
    hosts = measure_hosts(out / "hosts", python, options.seconds)
    print(
        f"two hosts: agents {max(hosts['agent_pss_bytes']) / 1e6:.1f} MB and "
        f"{max(hosts['agent_cpu_ratio']) * 100:.2f} % of a core at the most, "
        f"inits {max(hosts['init_pss_bytes']) / 1e6:.1f} MB, over {hosts['seconds']:.0f} s and {hosts['steps']} steps",
        flush=True,
    )
    found = report(steps, hosts, (before, os.getloadavg()[0]))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
