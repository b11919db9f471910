"""What this host can do by itself: how fast its processors and its memory are, whether its disks and GPUs are fit.

`doctor` calls this, and a preflight runs it as a process of its own (`python -m keepstep.app.measuring`), which has the
processors and the cgroup that a worker has. The processors hash: it is what the standard library does at the machine's
full speed, on as many threads as wanted. That is no multiplication of matrices; but what a quota, a clock that is held
down or a neighbour takes from the one it takes from the other.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import json
import os
import shutil
import sys
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from keepstep import kernel
from keepstep.adapters.clock import monotonic, thread_cpu_time
from keepstep.app.showing import size
from keepstep.core.values import frozen
from keepstep.ports import GpuSample

Level = Literal["ok", "warn", "bad"]

DISK_BYTES_MIN = 1 << 30
_WINDOW_S, _WINDOWS = 0.4, 3
"""A quota is given out each tenth of a second, so a window has several; the best one counts: others were disturbed."""
_COPY_S = 0.15
_BLOCK_BYTES = 1 << 20
_COPIED_BYTES = 32 << 20
_WRITTEN_BYTES = 1 << 20
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)


@frozen
class Finding:
    """What a check has found: `fix` is empty where nothing has to be done."""

    check: str
    level: Level
    found: str
    fix: str = ""


def hash_rate(threads: int) -> float:
    """Bytes that so many threads together hash in a second."""
    block = bytes(_BLOCK_BYTES)

    def hash_until(end: float) -> int:
        done = 0
        while monotonic() < end:
            hashlib.sha256(block)
            done += len(block)
        return done

    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(_WINDOWS):
            began = monotonic()
            done = sum(pool.map(hash_until, [began + _WINDOW_S] * threads))
            best = max(best, done / (monotonic() - began))
    return best


def copy_rate() -> float:
    """Bytes that one thread copies in a second, from memory to memory: more than its processor's caches hold.

    By the time that it had a processor: whether it gets one is for `hash_rate` to tell.
    """
    source, target = memoryview(bytearray(_COPIED_BYTES)), memoryview(bytearray(_COPIED_BYTES))
    target[:] = source  # the first time its pages are made
    best = 0.0
    for _ in range(_WINDOWS):
        began, copies = thread_cpu_time(), 0
        while (took_s := thread_cpu_time() - began) < _COPY_S:
            target[:] = source
            copies += 1
        best = max(best, copies * _COPIED_BYTES / took_s)
    return best


def processors() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0))


def look_at_disk(what: str, folder: Path) -> Finding:
    """Write to a folder, or to the one that it would be made in, and see what is free."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        _write(existing)
    except OSError as error:
        fix = "make room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "let the container's user write there"
        return Finding("disk", "bad", f"{what}: {existing} can not be written: {error.strerror}", fix)
    free = shutil.disk_usage(existing).free
    level: Level = "ok" if free >= DISK_BYTES_MIN else "warn"
    return Finding("disk", level, f"{what}: {size(free)} free at {existing}", "" if level == "ok" else "make room")


def _write(folder: Path) -> None:
    """Have a file of some size reach the disk; it has no name where the file system can do without."""
    name: Path | None = folder / f".keepstep-{uuid.uuid4().hex[:8]}"
    try:
        fd = os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        name = None
    except OSError as error:
        if error.errno not in _NO_TMPFILE:
            raise
        assert name is not None
        fd = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        left = memoryview(bytes(_WRITTEN_BYTES))
        while left:
            left = left[os.write(fd, left) :]
        os.fsync(fd)
    finally:
        os.close(fd)
        if name is not None:
            name.unlink(missing_ok=True)


def look_at_gpus(samples: Sequence[GpuSample], promised: int) -> Iterator[Finding]:
    """Hold what the driver sees against the devices that the container was given; nothing where all is well."""
    fix = "start the job again on another host"
    lost = [sample.uuid for sample in samples if sample.lost]
    if lost:
        yield Finding("GPU", "bad", f"lost by the driver: {', '.join(lost)}", fix)
    if len(samples) < promised:
        yield Finding("GPU", "bad", f"{promised} were given, the driver sees {len(samples)}", fix)


def main(words: list[str]) -> int:
    """Measure, and print each result as a line of JSON as soon as it is there."""
    parser = argparse.ArgumentParser(prog="keepstep.app.measuring", description="Print what this host can do.")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="that hash")
    parser.add_argument("--disk", action="append", default=[], metavar="NAME=FOLDER", help="to be written")
    parser.add_argument("--parent-pid", type=int, help="end with this process")
    options = parser.parse_args(words)
    if options.parent_pid is not None:
        kernel.die_with_parent(options.parent_pid)
    _tell({"speed": hash_rate(options.threads)})
    _tell({"memory": copy_rate()})
    for name, _, folder in (each.partition("=") for each in options.disk):
        _tell({"disk": asdict(look_at_disk(name, Path(folder)))})
    return 0


def _tell(found: dict[str, object]) -> None:
    print(json.dumps(found, separators=(",", ":")), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
