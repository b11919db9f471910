"""How soon the first line of a script runs after a container has started: keepstep's ENTRYPOINT and AWS's `train`.

One host, the default policy, the same interpreter for the script, in pairs whose order is drawn. The last line of the
output is one JSON object. README.md says how to read it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RATIO_MAX = 1.0
PAIRS, WARM = 20, 2
"""Pairs that count, and those before them: files come into memory."""
HOST = "localhost"
"""A name that is known: the toolkit waits for its host's own address first."""
PATIENCE_S = 60.0
SCRIPT = "import time; began = time.monotonic()\nopen('began', 'w').write(str(began))\n"


def make_base(folder: Path) -> Path:
    """A base directory as the platform lays it out."""
    config = folder / "input" / "config"
    for each in (config, folder / "code", folder / "model", folder / "output" / "data"):
        each.mkdir(parents=True)
    (folder / "code" / "train.py").write_text(SCRIPT)
    hosts = {"current_host": HOST, "hosts": [HOST], "network_interface_name": "lo"}
    chosen = {"sagemaker_program": json.dumps("train.py"), "epochs": json.dumps(3)}
    (config / "resourceconfig.json").write_text(json.dumps(hosts))
    (config / "hyperparameters.json").write_text(json.dumps(chosen))
    (config / "inputdataconfig.json").write_text("{}")
    return folder


def start_once(system: str, toolkit: Path, folder: Path) -> float:
    """Seconds from the start of the container's process to the script's first line."""
    base = make_base(folder / "base")
    path = f"{toolkit.parent}{os.pathsep}{os.environ['PATH']}"
    environment = {"PATH": path, "HOME": str(folder), "AWS_REGION": "us-east-1", "TRAINING_JOB_NAME": "startup"}
    if system == "toolkit":
        command, more = [str(toolkit.parent / "train")], {"SAGEMAKER_BASE_DIR": str(base)}
    else:
        command = [sys.executable, "-P", "-m", "keepstep", "train", "--base-dir", str(base)]
        command += ["--scratch-dir", str(folder / "scratch"), "--set", "telemetry.listen=127.0.0.1:0"]
        more = {"PYTHONPATH": str(ROOT / "runtime")}
    began = time.monotonic()
    done = subprocess.run(
        command, env=environment | more, capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    mark = base / "code" / "began"
    if done.returncode or not mark.exists():
        raise SystemExit(f"{system} ended with {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}")
    seconds = float(mark.read_text()) - began
    shutil.rmtree(folder)
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--toolkit", type=Path, required=True, help="a Python that has sagemaker-training")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    options = parser.parse_args()
    toolkit, draw = options.toolkit.absolute(), random.Random(1)
    seconds: dict[str, list[float]] = {"keepstep": [], "toolkit": []}
    with tempfile.TemporaryDirectory() as name:
        for pair in range(options.pairs + WARM):
            for system in draw.sample(list(seconds), 2):
                taken = start_once(system, toolkit, Path(name) / f"{system}-{pair}")
                if pair >= WARM:
                    seconds[system].append(taken)
    ratio = statistics.median(a / b for a, b in zip(seconds["keepstep"], seconds["toolkit"], strict=True))
    for system, each in seconds.items():
        print(f"{system:9}: median {statistics.median(each):.3f} s, worst {max(each):.3f} s")
    print(json.dumps({
        "name": "startup", "value": round(ratio, 3), "goal": f"<= {RATIO_MAX} of sagemaker-training's train",
        "ok": ratio <= RATIO_MAX, "seconds": {name: [round(one, 4) for one in each] for name, each in seconds.items()},
        "load_average": os.getloadavg()[0],
    }))  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
