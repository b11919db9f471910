"""Two hosts whose trainers, uploaders, agents and coordinator are killed at random, and an S3 that fails at times.

`keepstep local` with real inits, agents, uploaders and etcd, and LocalStack behind a proxy that inflicts what S3 and
the way to it do at times. The trainer's state is known at every step, so each checkpoint can be told from any other.
After each kill HEAD must name what it named before or a later step, whole; whatever a trainer restores must be one
step's state, and none older than what was committed. The last line of the output is one JSON object. README.md beside
this file says how to read it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.soak import Host, kill
from keepstep import kernel
from keepstep.app.faults import command_of, kill_family, uploader_of
from keepstep.checkpoint.commit import read_head, read_manifest
from keepstep.checkpoint.keys import manifests_prefix
from keepstep.checkpoint.manifest import Head, Manifest
from keepstep.checkpoint.restore import fetch
from keepstep.checkpoint.retrying import RetryingStore
from keepstep.init import RESTARTS_MAX
from keepstep.ports.store import ObjectStore
from keepstep_worker.slab import parse
from tests.support.faulty_s3 import FaultyS3
from tests.support.localstack import localstack
from tests.support.s3 import CREDENTIALS, bucket_store
from tests.support.torture_job import expected, sizes

ROOT = Path(__file__).resolve().parents[1]
HOSTS, JOB, PAUSE_S = 2, "local", 0.02
KILLS_PER_JOB = 25
SMALL_BYTES, LARGE_BYTES = 300_000, 150_000_000
"""Of the replicated state; half of the larger one goes up in several parts."""
LARGE_EVERY = 5
RATES = {
    "slow_down": 0.03, "cut": 0.02, "lost_answer": 0.03, "late_error": 0.1, "throttle": 0.03, "flipped_up": 0.02,
    "flipped_down": 0.02,
}  # fmt: skip
SETTINGS = (
    "restart.budget=10000 per 1h", "restart.ceiling=10000", "restart.same_step=100", "coordination.lease=3s",
    "restart.backoff.first=1ms", "checkpoint.every=1s", "checkpoint.snapshot_every=5 steps",
)  # fmt: skip
MOMENT_S = 1.2
"""A kill comes within so many seconds after a commit."""
SOON_SHARE = 0.25
"""Of the kills, those that are followed by the next one while the job still recovers."""
COMMITTED = "checkpoint_committed"
PATIENCE_S = 120.0
_POLL_S = 0.1


class Wrong(Exception):
    """Something that must never be."""


@dataclass
class Tally:
    """What was done and seen, over all jobs."""

    kills: Counter[str] = field(default_factory=Counter)
    restored: int = 0
    verified: int = 0
    committed: int = 0
    lost: int = 0
    jobs: int = 0


class Job:
    """One job in a bucket of its own; killed as a whole it is started again with the same store."""

    def __init__(self, folder: Path, bucket: str, direct: ObjectStore, endpoint: str, state_bytes: int) -> None:
        self.folder, self.store, self.state_bytes = folder, direct, state_bytes
        self.folder.mkdir(parents=True)
        keep = 1000 if state_bytes == SMALL_BYTES else 3
        settings = (*SETTINGS, f"checkpoint.keep.last={keep}")
        self._words = [
            *(sys.executable, "-m", "keepstep", "local", "--quiet", "--hosts", str(HOSTS), "--python", sys.executable),
            *("--store", f"s3://{bucket}", *(word for setting in settings for word in ("--set", setting))),
        ]
        self._script = [
            str(ROOT / "tests" / "support" / "torture_job.py"), str(folder), str(state_bytes), str(PAUSE_S)
        ]  # fmt: skip
        paths = os.pathsep.join((str(ROOT / "runtime"), str(ROOT)))
        self._environment = {**os.environ, **CREDENTIALS, "AWS_ENDPOINT_URL": endpoint, "PYTHONPATH": paths}
        self.heads: dict[str, int] = {}
        """Every manifest that HEAD was seen to name, and its step."""
        self.agents_killed: Counter[int] = Counter()
        """By the init that starts another one."""
        self._read: dict[Path, int] = {}
        self.run = folder / "run"
        self.start()

    def start(self) -> None:
        """Start it, for the first time or again."""
        self.run.mkdir(exist_ok=True)
        self.hosts = [Host(f"algo-{n}", self.run / "hosts" / f"algo-{n}") for n in range(1, HOSTS + 1)]
        words = [*self._words, "--out", str(self.run), *self._script]
        with (self.run / "output").open("wb") as output:
            self.process = subprocess.Popen(
                words, env=self._environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )

    def told(self) -> str:
        """The ends of what the run and its hosts have printed."""
        paths = [self.run / "output", *(host.folder / "log.txt" for host in self.hosts)]
        return "\n----\n".join(path.read_text(errors="replace")[-3000:] for path in paths if path.exists())

    def look(self) -> None:
        for host in self.hosts:
            host.look()

    def wait_for(self, what: str, is_there: Callable[[], bool]) -> None:
        """Wait for something.

        Raises:
            Wrong: it does not come, or the job ends before.
        """
        give_up = time.monotonic() + PATIENCE_S
        while not is_there():
            if self.process.poll() is not None:
                raise Wrong(f"the job has ended with {self.process.returncode} before {what}\n{self.told()}")
            if time.monotonic() > give_up:
                raise Wrong(f"no {what}\n{self.told()}")
            time.sleep(_POLL_S)
            self.look()

    def head(self) -> Head | None:
        """HEAD, past the proxy; noted where it names a checkpoint."""
        head = read_head(self.store, JOB).head
        if head is None or not head.manifest:
            return None
        self.heads[head.manifest] = head.step
        return head

    def committed_after(self, before: Head | None) -> bool:
        """Whether HEAD names a later checkpoint than before; read when an agent says that it has committed."""
        newest = max((e["step"] for host in self.hosts for e in host.events if e["kind"] == COMMITTED), default=0)
        if newest <= (before.step if before else 0):
            return False
        head = self.head()
        return head is not None and (before is None or head.step > before.step)

    def restorations(self) -> list[dict[str, Any]]:
        """What trainers have restored since this was asked last."""
        found = []
        for path in sorted(self.folder.glob("restored-*.jsonl")):
            lines = path.read_text().splitlines()
            found += [json.loads(line) for line in lines[self._read.get(path, 0) :]]
            self._read[path] = len(lines)
        return found

    def etcd(self) -> int | None:
        init = self.hosts[0].init
        children = [pid for pid, process in kernel.processes().items() if init and process.parent == init]
        return next((pid for pid in children if "etcd" in command_of(pid).split(" ")[0]), None)

    def end(self) -> None:
        """Let it come to its end.

        Raises:
            Wrong: it does not, or not well.
        """
        (self.folder / "enough").touch()
        try:
            code = self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise Wrong(f"the job does not end\n{self.told()}") from None
        if code:
            raise Wrong(f"the job ended with {code}\n{self.told()}")


# --- kills -----------------------------------------------------------------------------------------------------------


def kill_host(job: Job, host: Host) -> bool:
    if not host.init:
        return False
    kill_family(host.init)
    return True


def kill_agent(job: Job, host: Host) -> bool:
    """As often as init starts another one within its window, and no more: then the host gives up, as it should."""
    init = host.init
    if not init or job.agents_killed[init] >= RESTARTS_MAX or not kill(host.agent):
        return False
    job.agents_killed[init] += 1
    return True


def kill_all(job: Job, host: Host) -> bool:
    """The whole job, as when the platform takes all instances away; the next run knows nothing but the store."""
    kill_family(job.process.pid)
    job.process.wait()
    job.start()
    return True


KILLS: dict[str, tuple[int, Callable[[Job, Host], bool]]] = {
    "trainer": (4, lambda job, host: kill(host.worker)),
    "uploader": (4, lambda job, host: kill(uploader_of(host.agent) if host.agent else None)),
    "agent": (4, kill_agent),
    "coordinator": (2, lambda job, host: kill(job.etcd())),
    "host": (2, kill_host),
    "whole job": (1, kill_all),
}
"""How often each, against the others, and how."""


def strike(job: Job, dice: random.Random) -> str:
    """Kill somebody who is there to be killed; says who."""
    while True:
        job.look()
        (kind,) = dice.choices(list(KILLS), [weight for weight, _ in KILLS.values()])
        if KILLS[kind][1](job, dice.choice(job.hosts)):
            return kind
        time.sleep(_POLL_S)


# --- what must hold --------------------------------------------------------------------------------------------------


def check_checkpoint(job: Job, manifest: Manifest) -> None:
    """Restore each rank of a checkpoint from the store, and see that every byte is that step's.

    Raises:
        Wrong: one is not.
    """
    for rank in range(manifest.world_size):
        fd = os.memfd_create("slab")
        try:
            fetched = fetch(job.store, manifest, rank, fd)
            data = memoryview(os.pread(fd, fetched.size_bytes, 0))
        finally:
            os.close(fd)
        places, _ = parse(data, len(data))
        for key, size in sizes(job.state_bytes, rank).items():
            place = places[key]
            if data[place.begin : place.end] != expected(key, manifest.step, size):
                raise Wrong(f"{manifest.key}, rank {rank}: {key} is not what it was after step {manifest.step}")


def check_after(job: Job, before: Head | None, tally: Tally) -> Head | None:
    """HEAD names what it did or a later step, whole; nothing older was restored, and nothing mixed.

    Raises:
        Wrong: it is otherwise.
    """
    after = job.head()
    if before is not None and (after is None or after.step < before.step):
        raise Wrong(f"HEAD was at step {before.step} and is at {after and after.step}")
    if after is not None:
        check_checkpoint(job, read_manifest(job.store, JOB, after.manifest))
        tally.verified += 1
    check_restorations(job, before, tally)
    return after


def check_restorations(job: Job, before: Head | None, tally: Tally) -> None:
    """What was restored since this was asked last is one step's state, and none older than what HEAD named before.

    Raises:
        Wrong: it is otherwise.
    """
    for found in job.restorations():
        tally.restored += 1
        if found["wrong"]:
            raise Wrong(f"generation {found['generation']} restored {found['wrong']} of another step: {found}")
        if before is not None and found["step"] < before.step:
            raise Wrong(f"step {before.step} was committed, and {found} restored")


def check_store(job: Job, tally: Tally) -> None:
    """All that was ever committed, and not swept by the policy, is there and whole.

    Raises:
        Wrong: it is otherwise.
    """
    keys = set(job.store.list(manifests_prefix(JOB)))
    lost = set(job.heads) - keys if job.state_bytes == SMALL_BYTES else set()
    tally.lost += len(lost)
    if lost:
        raise Wrong(f"committed and gone: {sorted(lost)}")
    for key in sorted(keys):
        check_checkpoint(job, read_manifest(job.store, JOB, key))
        tally.verified += 1
    tally.committed += len(job.heads)


def play(job: Job, kills: int, dice: random.Random, tally: Tally) -> None:
    """Kill so often, look each time, and let the job end.

    Raises:
        Wrong: something was not as it must be.
    """
    job.wait_for("first commit", lambda: job.committed_after(None))
    after: Head | None = None
    for _ in range(kills):
        time.sleep(dice.uniform(0.0, MOMENT_S))  # the moment of the kill, not a wait for anything
        before = job.head()
        check_restorations(job, after, tally)  # before HEAD was had, others may have restored, and committed since then
        tally.kills[strike(job, dice)] += 1
        after = check_after(job, before, tally)
        if dice.random() >= SOON_SHARE:
            job.wait_for("commit after a kill", lambda after=after: job.committed_after(after))
            check_after(job, after, tally)
    last = job.head()
    check_restorations(job, after, tally)
    job.wait_for("commit after the last kill", lambda: job.committed_after(last))
    job.end()
    check_after(job, last, tally)
    check_store(job, tally)
    tally.jobs += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "torture")
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    folder = options.out.absolute()
    shutil.rmtree(folder, ignore_errors=True)
    dice, tally, begun, wrong = random.Random(options.seed), Tally(), time.monotonic(), ""
    os.environ.update(CREDENTIALS)
    with localstack(folder / "localstack") as server, FaultyS3(server, RATES, options.seed) as proxy:
        while sum(tally.kills.values()) < options.kills and not wrong:
            bucket = f"torture{tally.jobs}"
            state_bytes = LARGE_BYTES if tally.jobs % LARGE_EVERY == LARGE_EVERY - 1 else SMALL_BYTES
            direct = RetryingStore(bucket_store(server, bucket))
            job = Job(folder / bucket, bucket, direct, proxy.endpoint, state_bytes)
            kills = min(KILLS_PER_JOB, options.kills - sum(tally.kills.values()))
            try:
                play(job, kills, dice, tally)
            except Wrong as error:
                wrong = str(error)
            finally:
                kill_family(job.process.pid)
                job.process.wait()
            for key in list(job.store.list("")):
                job.store.delete(key)
            print(f"job {tally.jobs}: {sum(tally.kills.values())} kills, {dict(tally.kills)}", flush=True)
    unseen = [kind for kind in RATES if not proxy.counts[kind]]
    if unseen and tally.jobs >= LARGE_EVERY and not wrong:
        wrong = f"never done: {', '.join(unseen)}"
    if wrong:
        print(wrong)
    last = {"name": "torture", "value": sum(tally.kills.values()), "goal": options.kills, "ok": not wrong,
            "kills": dict(tally.kills), "requests": proxy.counts, "restored_by_trainers": tally.restored,
            "checkpoints_committed": tally.committed, "checkpoints_lost": tally.lost,
            "checkpoints_verified": tally.verified, "jobs": tally.jobs, "seed": options.seed,
            "seconds": time.monotonic() - begun}  # fmt: skip
    print(json.dumps(last))
    return 1 if wrong else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
