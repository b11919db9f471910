"""From the last arrival to "start": keepstep's coordination on a three-member etcd, beside torch's rendezvous.

And from the end of a node's lease to the next generation's "ready". The last line of the output is one JSON object.
README.md beside this file says how to read it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keepstep.adapters.etcd_member import choose_data_dir
from tests.support.etcd import EtcdCluster

HERE = Path(__file__).parent
PROCESSES = 4
SIZES = (2, 16, 64, 256)
REPEATS = 5
AT_ONCE = 16
SETTLES_S = 2.0
"""How long those who came first are given to come to rest, on either side, before the last one arrives."""
RATIO_MAX, START_MAX_S, READY_MAX_S = 0.5, 1.0, 0.3
PATIENCE_S = 60.0
"""For one thing to happen; torch's participants may take longer than this to come together, which is then said."""


class Crew:
    """The processes of one side, and what they say."""

    def __init__(self, command: list[str], settings: list[dict[str, Any]]) -> None:
        self.said: list[dict[str, Any]] = []
        self._heard = threading.Condition()
        env = {**os.environ, "PYTHONPATH": str(HERE.parent / "runtime")}
        self.processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
            for _ in settings
        ]
        self._listeners = [threading.Thread(target=self._listen, args=(each,)) for each in self.processes]
        for process, listener, setting in zip(self.processes, self._listeners, settings, strict=True):
            listener.start()
            self._write(process, setting)

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with self._heard:
                self.said.append(json.loads(line))
                self._heard.notify_all()

    def _write(self, process: subprocess.Popen[str], what: dict[str, Any]) -> None:
        assert process.stdin is not None
        process.stdin.write(json.dumps(what) + "\n")
        process.stdin.flush()

    def orders(self, **what: list[str]) -> None:
        """Tell the process that has the host; hosts are dealt out in turn."""
        for order, hosts in what.items():
            for turn, process in enumerate(self.processes):
                mine = [host for host in hosts if (int(host.partition("-")[2]) - 1) % len(self.processes) == turn]
                if mine:
                    self._write(process, {order: mine})

    def waits(self, enough: Callable[[list[dict[str, Any]]], bool], what: str) -> list[dict[str, Any]]:
        """Return what was said once it is enough."""
        with self._heard:
            satisfied = self._heard.wait_for(lambda: enough(self.said) or self.told("failed"), PATIENCE_S)
            if failed := self.told("failed"):
                raise RuntimeError(f"{failed[0]['host']}: {failed[0]['error']}")
            if not satisfied:
                raise TimeoutError(f"waited {PATIENCE_S:.0f} s for {what}")
            return list(self.said)

    def told(self, what: str) -> list[dict[str, Any]]:
        return [each for each in self.said if each["what"] == what]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process, listener in zip(self.processes, self._listeners, strict=True):
            listener.join()
            with process:
                process.wait()


def dealt(hosts: list[str]) -> list[list[str]]:
    """The hosts of each process."""
    return [hosts[turn::PROCESSES] for turn in range(PROCESSES) if hosts[turn::PROCESSES]]


def come(crew: Crew, hosts: list[str]) -> None:
    """Have hosts come a few at a time: on machines of their own they would not all need these two cores at once."""
    for begun in range(0, len(hosts), AT_ONCE):
        crew.orders(join=hosts[begun : begun + AT_ONCE])
        there = min(len(hosts), begun + AT_ONCE)
        crew.waits(lambda _, there=there: len(crew.told("registered")) == there, f"{there} to come")  # type: ignore[misc]


def last_arrival(crew: Crew, hosts: list[str]) -> float:
    """Have all but one come and rest, then the last one; returns the seconds from its coming to the last start."""
    *first, last = hosts
    come(crew, first)
    time.sleep(SETTLES_S)
    crew.orders(join=[last])
    crew.waits(lambda _: bool(started(crew, len(hosts))), "all to start")
    came_at = next(each["at"] for each in crew.told("joins") if each["host"] == last)
    return max(started(crew, len(hosts))) - came_at


def started(crew: Crew, size: int) -> list[float]:
    """When each host started in the first world in which all did; empty where there is none yet."""
    worlds: dict[int, dict[str, float]] = {}
    for each in crew.told("starts"):
        world = worlds.setdefault(each.get("generation", 0), {})
        world[each["host"]] = each["at"]
        if len(world) == size:
            return [*world.values()]
    return []


def keepstep_crew(endpoints: list[str], job: str, hosts: list[str], limits: dict[str, Any], folder: str) -> Crew:
    setting = {"endpoints": endpoints, "job": job, "hosts": hosts, "limits": limits, "folder": folder}
    settings = [{**setting, "mine": mine} for mine in dealt(hosts)]
    crew = Crew([sys.executable, str(HERE / "rendezvous_nodes.py")], settings)
    crew.waits(lambda _: len(crew.told("prepared")) == len(settings), "the processes")
    return crew


def keepstep_start(endpoints: list[str], job: str, size: int) -> float:
    hosts = [f"algo-{n}" for n in range(1, size + 1)]
    with tempfile.TemporaryDirectory() as folder:
        crew = keepstep_crew(endpoints, job, hosts, {"min": size, "max": size}, folder)
        try:
            return last_arrival(crew, hosts)
        finally:
            crew.close()


def keepstep_ready(endpoints: list[str], job: str, size: int) -> float:
    """Seconds from the end of a member's lease, as the leader hears of it, to the next generation's "ready"."""
    hosts = [f"algo-{n}" for n in range(1, size + 2)]  # one more than train: it takes the lost one's place
    with tempfile.TemporaryDirectory() as folder:
        crew = keepstep_crew(endpoints, job, hosts, {"min": size, "max": size}, folder)
        try:
            come(crew, hosts)
            # the leader may hear that what it put is there after the others have seen it
            crew.waits(lambda _: len(crew.told("starts")) >= size and bool(crew.told("ready")), "the first world")
            time.sleep(SETTLES_S)
            before = crew.told("ready")[-1]
            trains = {each["host"] for each in crew.told("starts") if each["generation"] == before["generation"]}
            crew.orders(vanish=[max(trains - {before["host"]})])
            crew.waits(lambda _: crew.told("ready")[-1]["generation"] > before["generation"], "the next generation")
            return float(crew.told("ready")[-1]["at"] - crew.told("gone")[-1]["at"])
        finally:
            crew.close()


def torch_start(python: str, job: str, size: int) -> float | None:
    """As `keepstep_start`; None where not all have started after PATIENCE_S."""
    hosts = [f"algo-{n}" for n in range(1, size + 1)]
    command = [python, str(HERE / "rendezvous_torch.py")]
    server = Crew(command, [{"serves": True}])
    server.waits(lambda _: bool(server.told("serves")), "the TCPStore")
    setting = {"job": job, "hosts": hosts, "port": server.told("serves")[0]["port"]}
    crew = Crew(command, [{**setting, "mine": mine} for mine in dealt(hosts)])
    try:
        crew.waits(lambda _: len(crew.told("prepared")) == size, "the participants")
        return last_arrival(crew, hosts)
    except TimeoutError as error:
        print(f"torch: {error}", flush=True)
        return None
    finally:
        crew.close()
        server.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", required=True, help="a Python that has torch")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    arguments = parser.parse_args()
    ours: dict[int, list[float]] = {size: [] for size in arguments.sizes}
    theirs: dict[int, list[float | None]] = {size: [] for size in arguments.sizes}
    ready: list[float] = []
    memory = choose_data_dir("etcd", Path(tempfile.gettempdir())).parent  # where the agents' own members have it
    with tempfile.TemporaryDirectory(dir=memory) as folder, EtcdCluster(Path(folder)) as etcd:
        for repeat in range(arguments.repeats):
            for size in arguments.sizes:
                ours[size].append(keepstep_start(etcd.endpoints, f"start-{size}-{repeat}", size))
                theirs[size].append(torch_start(arguments.torch, f"start-{size}-{repeat}", size))
                other = theirs[size][-1]
                torch = f"not within {PATIENCE_S:.0f} s" if other is None else f"{other:.3f} s"
                print(f"{size:4} participants: keepstep {ours[size][-1]:.3f} s, torch {torch}", flush=True)
            ready.append(keepstep_ready(etcd.endpoints, f"ready-{repeat}", 64))
            print(f"  64 members, one lost: ready after {ready[-1]:.3f} s", flush=True)
    ratios = {
        size: statistics.median(
            mine / (other or PATIENCE_S) for mine, other in zip(ours[size], theirs[size], strict=True)
        )
        for size in arguments.sizes
    }
    largest = max(arguments.sizes)
    start_s, ready_s = statistics.median(ours[largest]), statistics.median(ready)
    judged = [ratio for size, ratio in ratios.items() if size >= 64]
    print(json.dumps({
        "name": "rendezvous", "value": round(ratios[largest], 3),
        "goal": f"ratio <= {RATIO_MAX} from 64 on, start <= {START_MAX_S} s at 256, ready <= {READY_MAX_S} s at 64",
        "ok": all(ratio <= RATIO_MAX for ratio in judged) and start_s <= START_MAX_S and ready_s <= READY_MAX_S,
        "ratios": {str(size): round(ratio, 3) for size, ratio in ratios.items()},
        "start_s": round(start_s, 3), "ready_s": round(ready_s, 3),
        "keepstep_s": {str(size): [round(each, 3) for each in found] for size, found in ours.items()},
        "torch_s": {str(size): [each and round(each, 3) for each in found] for size, found in theirs.items()},
        "torch_patience_s": PATIENCE_S,
        "ready_all_s": [round(each, 3) for each in ready], "load_average": os.getloadavg()[0],
    }))  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
