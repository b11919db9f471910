"""`make campaign-health`: each preset with 1,000 hosts in which some become slow and some lose a GPU; a simulation."""

from __future__ import annotations

import argparse
import json
import multiprocessing
from typing import Any

from keepstep.app.simulating_health import simulate_hosts, text_of
from keepstep.intake.policy import preset_names


def _play(work: tuple[str, int, float, int]) -> dict[str, Any]:
    return simulate_hosts(*work)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=1000)
    parser.add_argument("--hours", type=float, default=6.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    options = parser.parse_args()
    bad = 0
    with multiprocessing.Pool(options.processes) as pool:
        work = [(name, options.hosts, options.hours, options.seed) for name in preset_names()]
        for found in pool.imap(_play, work):
            print(text_of(found), end="\n\n")
            print(json.dumps(found), flush=True)
            bad += any(run["violations"] for run in found["runs"].values())
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
