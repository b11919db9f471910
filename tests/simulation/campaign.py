"""`make campaign`: ten thousand jobs of 3 to 100 hosts, over all cores; one line for each seed that broke a rule."""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections import Counter

from keepstep.simulation.many_faults import MANY_FAULTS
from keepstep.simulation.run import Outcome
from tests.simulation.seeds import play_many

_AT_ONCE = 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:10000", help="FROM:TO")
    parser.add_argument("--hosts", type=int, default=0, help="as many hosts in each job; 0: 3 to 100, mostly few")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    arguments = parser.parse_args()
    first, last = map(int, arguments.seeds.split(":"))
    started, fired, codes, bad, largest = time.monotonic(), Counter[str](), Counter[str](), 0, 0
    with multiprocessing.Pool(arguments.processes) as pool:
        work = ((seed, arguments.hosts) for seed in range(first, last))
        outcome: Outcome
        for done, outcome in enumerate(pool.imap_unordered(play_many, work, _AT_ONCE), 1):
            fired += outcome.fired
            codes[" and ".join(map(str, outcome.codes))] += 1
            largest = max(largest, outcome.hosts)
            if outcome.violations:
                bad += 1
                print(f"seed {outcome.seed}, {outcome.hosts} hosts: {outcome.violations[0]}", flush=True)
            if done % 1000 == 0:
                print(f"{done} seeds, {bad} bad, {time.monotonic() - started:.0f} s", flush=True)
    print(f"{last - first} seeds of up to {largest} hosts, {bad} bad, {time.monotonic() - started:.0f} s")
    print("faults: " + ", ".join(f"{fault.name} {fired[fault.name]}" for fault in MANY_FAULTS))
    print("exit codes: " + ", ".join(f"{code}: {count}" for code, count in codes.most_common()))
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
