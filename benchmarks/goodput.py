"""What a fault costs a training that is hurt all the time: seconds lost, in waiting and in steps done again.

keepstep, torchrun, and a loop that starts a TensorFlow script again: two workers, steps of 50 ms, a worker killed every
20 s on average for ten minutes, at the same moments for all. The last line of the output is one JSON object. README.md
says how to read it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.recovery import Run
from keepstep.app.replay import journals_under

SYSTEMS = ("standby", "torchrun", "plain")
TO_TORCHRUN_MAX, TO_PLAIN_MAX = 0.5, 0.3
WARM_S = 15.0
"""How long training goes on before the first fault: standbys make their imports, checkpoints are written."""


def read_steps(folder: Path) -> list[tuple[int, int, float]]:
    """Rank 0's steps: pid, step, second of CLOCK_MONOTONIC."""
    lines = (folder / "steps-0").read_text().splitlines()
    return [(int(pid), int(step), float(at)) for pid, step, at in map(str.split, lines)]


def play(system: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train and hurt; what came of it."""
    draw, run = random.Random(options.seed), Run(system, options, folder)
    try:
        run.wait_for(lambda: all(run.newest(rank)[1] > 0 for rank in range(2)), "first step")
        time.sleep(WARM_S)
        began, due, kills = time.monotonic(), 0.0, 0
        while (due := due + draw.expovariate(1 / options.gap)) < options.seconds:
            time.sleep(max(0.0, began + due - time.monotonic()))
            if time.monotonic() > began + options.seconds:
                break
            run.kill_one(draw.randrange(2))
            kills += 1
        time.sleep(max(0.0, began + options.seconds - time.monotonic()))
        ended = time.monotonic()
    finally:
        run.end()
    steps = [each for each in read_steps(folder) if began <= each[2] <= ended]
    usual_s = statistics.median(b[2] - a[2] for a, b in pairwise(steps) if a[0] == b[0])
    trained_s = (max(step for _, step, _ in steps) - min(step for _, step, _ in steps)) * usual_s
    lost_s = max(0.0, (ended - began) - trained_s)
    found = {
        "faults": kills, "goodput": round(trained_s / (ended - began), 4), "step_s": round(usual_s, 5),
        "lost_s_per_fault": round(lost_s / max(1, kills), 4),
    }  # fmt: skip
    if system == "standby":
        found["met_a_standby"] = share_from_standbys(folder / "run" / "hosts")
    return found


def share_from_standbys(folder: Path) -> float:
    """Of all workers but the first ones, how many were standbys."""
    started = []
    for path in journals_under(folder):
        for line in path.read_text().splitlines():
            if "worker_starts" in line:
                turn = json.loads(line)
                started += [text for reason, text in turn["notes"] if reason == "worker_starts"]
    later = [text for text in started if "generation 1 " not in text]
    return round(sum("from a standby" in text for text in later) / max(1, len(later)), 4)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", type=Path, required=True, help="a Python that has TensorFlow")
    parser.add_argument("--torch", type=Path, required=True, help="a Python that has torch")
    parser.add_argument("--bytes", type=int, default=100_000_000)
    parser.add_argument("--step", type=float, default=0.05, help="seconds of a step")
    parser.add_argument("--gap", type=float, default=20.0, help="mean seconds between two faults")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    options.python, options.torch = options.python.absolute(), options.torch.absolute()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        found = {system: play(system, options, Path(name) / system) for system in SYSTEMS}
    for system, each in found.items():
        print(f"{system:9}: {each['faults']} faults, {each['lost_s_per_fault']:.2f} s lost for each, ", end="")
        print(f"goodput {each['goodput']:.3f}")
    lost = {system: each["lost_s_per_fault"] for system, each in found.items()}
    ratios = {other: round(lost["standby"] / lost[other], 3) for other in ("torchrun", "plain")}
    print(json.dumps({
        "name": "goodput", "value": ratios, "goal": {"torchrun": TO_TORCHRUN_MAX, "plain": TO_PLAIN_MAX},
        "ok": ratios["torchrun"] <= TO_TORCHRUN_MAX and ratios["plain"] <= TO_PLAIN_MAX, "systems": found,
        "bytes": options.bytes, "load_average": os.getloadavg()[0],
    }))  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
