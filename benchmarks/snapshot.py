"""How long a snapshot keeps the training waiting, and drags the steps after it, beside `tf.train.Checkpoint`.

Each mode in a process of its own, the modes in turn. The last line of the output is one JSON object. README.md beside
this file says how to read it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
JOB = ROOT / "benchmarks" / "snapshot_job.py"
MODES = {"memcpy": 1, "keepstep": 6, "sync": 1, "async": 2}
"""How often each saves, as against the others: what costs little is hard to tell from what else a machine does."""
EVERY, DRAGGED = 60, 20
"""Steps from one saving to the next, and those after it that are looked at."""
SAVINGS_BYTES = 6_400_000_000
"""Of a process that saves the least often, all in all, so that small states are saved more often."""
FIRST = 3
"""Savings that are left out: memory is had for the first time."""
STALL_RATIO_MAX, COST_RATIO_MAX = 1.5, 0.1


def play(mode: str, size_bytes: int, savings: int, options: argparse.Namespace) -> dict[str, Any]:
    """One process of one mode; what TensorFlow's own modes write lies in `options.folder`."""
    python = options.python.absolute()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        result = Path(folder) / "result.json"
        words = [
            *(f"--mode={mode}", f"--bytes={size_bytes}", f"--every={EVERY}", f"--savings={savings}"),
            *(f"--folder={folder}", f"--result={result}"),
        ]
        settings = [f"checkpoint.snapshot_every={EVERY} steps", "telemetry.listen=127.0.0.1:0"]
        chosen = [word for setting in settings for word in ("--set", setting)]
        command = [str(python), str(JOB), *words]
        if mode == "keepstep":
            local = [sys.executable, "-m", "keepstep", "local", "--quiet", "--hosts", "1", "--store", "none", *chosen]
            command = [*local, "--python", str(python), "--out", f"{folder}/run", str(JOB), *words]
        env = {**os.environ, "PYTHONPATH": str(ROOT / "runtime"), "TF_CPP_MIN_LOG_LEVEL": "2"}
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        if not result.exists():
            raise SystemExit(f"{mode}: no result\n{(done.stdout + done.stderr)[-3000:]}")
        found: dict[str, Any] = json.loads(result.read_text())
        return found


def costs(found: dict[str, Any]) -> tuple[list[float], list[list[float]]]:
    """Of each saving that counts: the seconds it took, and what its step and each after it took above the usual.

    The usual step is that of the quiet ones before and after it: on machines that share a processor it changes within
    seconds, and by 21 times as much as it is wrong a cost is.
    """
    steps = [each / 1e9 for each in found["steps_ns"]]
    above = []
    for at in range(EVERY * (FIRST + 1) - 1, len(steps) - EVERY + 1, EVERY):
        usual = middle(steps[at - EVERY + DRAGGED + 1 : at] + steps[at + DRAGGED + 1 : at + EVERY])
        above.append([each - usual for each in steps[at : at + DRAGGED + 1]])
    return [each / 1e9 for each in found["savings_ns"]][FIRST : FIRST + len(above)], above


def middle(figures: Sequence[float]) -> float:
    """The mean of the middle half: what a machine that is busy with something else makes of a step is left out.

    Everything that is compared is taken so: medians do not add up, and a mode that saves nothing would have a cost.
    """
    outside = len(figures) // 4
    return statistics.fmean(sorted(figures)[outside : len(figures) - outside])


def measure(size_bytes: int, options: argparse.Namespace) -> dict[str, Any]:
    """All modes in turn; the median of what all savings that count took, and the sum of what the steps then did."""
    stalls: dict[str, list[float]] = {mode: [] for mode in MODES}
    above: dict[str, list[list[float]]] = {mode: [] for mode in MODES}
    found: dict[str, Any] = {}
    speedups: list[float] = []
    skipped = 0
    for _ in range(options.rounds):
        for mode, share in MODES.items():
            found = play(mode, size_bytes, share * max(2, SAVINGS_BYTES // size_bytes) + FIRST, options)
            skipped += found.get("skipped", 0)
            speedups += [found["copy_speedup"]] if "copy_speedup" in found else []
            took, steps = costs(found)
            stalls[mode] += took
            above[mode] += steps
    stall = {mode: statistics.median(each) for mode, each in stalls.items()}
    whole = {mode: sum(map(middle, zip(*each, strict=True))) for mode, each in above.items()}
    for mode in MODES:
        print(f"{found['bytes'] / 1e9:.1f} GB, {mode:8}: waits {stall[mode] * 1e3:8.1f} ms, costs ", end="")
        print(f"{whole[mode] * 1e3:8.1f} ms with the {DRAGGED} steps after it", flush=True)
    print(f"all cores copy {', '.join(f'{each:.2f}' for each in speedups)} times as fast as one", flush=True)
    return {
        "bytes": found["bytes"],
        "variables": found["variables"],
        "stall_ratio": round(stall["keepstep"] / stall["memcpy"], 3),
        "cost_ratio": round(whole["keepstep"] / min(whole["sync"], whole["async"]), 3),
        "skipped": skipped,
        "copy_speedup": [round(each, 3) for each in speedups],
        "stall_s": {mode: [round(each, 5) for each in kept] for mode, kept in stalls.items()},
        "cost_s": {mode: [round(sum(each), 5) for each in kept] for mode, kept in above.items()},
    }


def is_reached(found: dict[str, Any]) -> bool:
    """Whether both goals are, by snapshots of which none was left out."""
    reached = found["stall_ratio"] <= STALL_RATIO_MAX and found["cost_ratio"] <= COST_RATIO_MAX
    return bool(reached and not found["skipped"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", type=Path, required=True, help="a Python that has TensorFlow")
    parser.add_argument("--bytes", type=int, nargs="+", default=[800_000_000, 4_000_000_000])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=ROOT / "build", help="where TensorFlow's own modes write")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(options.folder).free < 3 * max(options.bytes):
        raise SystemExit(f"{options.folder} has no room for the checkpoints of TensorFlow's own modes")
    sizes = [measure(each, options) for each in options.bytes]
    print(json.dumps({
        "name": "snapshot", "value": max(each["stall_ratio"] for each in sizes),
        "goal": f"stall <= {STALL_RATIO_MAX} of a memcpy, stall and drag <= {COST_RATIO_MAX} of tf.train.Checkpoint's",
        "ok": all(is_reached(each) for each in sizes),
        "sizes": sizes, "load_average": os.getloadavg()[0],
    }))  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
