"""Hosts that are strained for real, by the kernel's own files: a quota, a neighbour, memory, disks, descriptors."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from keepstep.adapters.host import Disks, HostReader
from keepstep.app.replay import journals_under, replay
from keepstep.core.events import StrainsChanged
from keepstep.core.host_sample import HostSample, Strain, StrainKind
from keepstep.core.strains import find_strains
from tests.support.control_groups import control_group, missing, set_quota
from tests.support.init_host import wait_until

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
JOIN = "import os, sys; from pathlib import Path; Path(sys.argv[1], 'cgroup.procs').write_text(str(os.getpid()));"
BUSY = "print(flush=True)\nwhile True: pass"
EATS = """
import mmap
print(flush=True)
held = []
for line in sys.stdin:
    held.append(mmap.mmap(-1, 1 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE))
    print(flush=True)
"""


@contextlib.contextmanager
def script(
    code: str, *arguments: str, cpus: set[int] | None = None, files: int | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs some lines of Python, once it has said its first word."""

    def prepare() -> None:
        if cpus is not None:
            os.sched_setaffinity(0, cpus)
        if files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=prepare
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == b"\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def reader(process: subprocess.Popen[bytes]) -> HostReader:
    """What an agent would read, were it this process."""
    return HostReader(Disks(()), agent=process.pid, eldest=process.pid)


def strain(read: Callable[[], HostSample], kind: StrainKind, before: HostSample | None = None) -> Strain:
    """The first one of a kind since a sample."""
    before = before or read()

    def look() -> Strain | None:
        return next((found for found in find_strains(before, read()) if found.kind is kind), None)

    return wait_until(look, kind.value)


@pytest.mark.skipif(bool(missing("cpu")), reason=missing("cpu"))
def test_a_quota_holds_a_busy_process_back_until_it_is_lifted():
    with control_group("cpu", cpu_max="20000 100000") as group, script(JOIN + BUSY, str(group)) as busy:
        read = reader(busy).read
        sample = read()
        assert StrainKind.CPU_QUOTA not in {each.kind for each in find_strains(sample, sample)}
        found = strain(read, StrainKind.CPU_QUOTA, sample)
        assert found.text.startswith("cpu held back by its quota ")
        set_quota(group, "max")
        freed = read()
        later = wait_until(lambda: (now := read()).own_cpu_s > freed.own_cpu_s + 0.5 and now, "half a second of work")
        assert StrainKind.CPU_QUOTA not in {each.kind for each in find_strains(freed, later)}


@pytest.mark.skipif(bool(missing("memory")), reason=missing("memory"))
def test_memory_runs_short_and_then_somebody_is_killed():
    with control_group("memory", memory_max=str(48 << 20)) as group, script(JOIN + EATS, str(group)) as eater:
        assert eater.stdin is not None and eater.stdout is not None
        # the group's files are read for a process that is in it, and goes on when the other is gone
        with script(JOIN + "print(flush=True); sys.stdin.read()", str(group)) as witness:
            read = reader(witness).read
            before = read()
            assert before.memory_limit_bytes == 48 << 20 and before.oom_kills == 0

            def short() -> Strain | None:
                eater.stdin.write(b"\n")
                eater.stdin.flush()
                eater.stdout.readline()
                sample = read()
                return next((each for each in find_strains(sample, sample) if "memory" in each.text), None)

            assert wait_until(short, "memory to be short").text.endswith("MB of the container's memory left")
            with contextlib.suppress(BrokenPipeError):
                eater.stdin.write(b"\n" * 60)
                eater.stdin.flush()
            assert eater.wait(60) == -signal.SIGKILL
            assert strain(read, StrainKind.OOM_KILLS, before).text == "1 process killed for want of memory"


def test_a_neighbour_on_the_same_processors_is_seen():
    """Both are held to one processor, of which each gets a half."""
    cpu = {min(os.sched_getaffinity(0))}
    with script(BUSY, cpus=cpu) as ours:
        read = reader(ours).read
        with script(BUSY, cpus=cpu):
            found = strain(read, StrainKind.CPU_NEIGHBOURS)
        assert found.text.startswith("cpu taken by other processes ") and found.figure > 0.1


def test_a_worker_that_has_hardly_any_descriptors_left():
    opens = "held = [open('/dev/null') for _ in range(22)]; print(flush=True); input()"
    with script(opens, files=28) as hoarder:
        found = strain(HostReader(Disks(()), agent=hoarder.pid).read, StrainKind.DESCRIPTORS)
        assert found.text == "25 of 28 file descriptors open (agent)"


@contextlib.contextmanager
def disk(folder: Path, size: str) -> Iterator[Path]:
    """A small file system of its own."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a disk")


@needs_root
def test_a_disk_fills_up_and_can_only_be_read(tmp_path):
    with disk(tmp_path / "small", "8m") as small:
        read = HostReader(Disks((str(small),))).read
        sample = read()
        assert not [each for each in find_strains(sample, sample) if each.what == str(small)]
        (small / "data").write_bytes(bytes(8_200_000))
        assert strain(read, StrainKind.DISK_SHORT).text == f"disk {small} has 188 kB left"
        with contextlib.suppress(OSError), (small / "more").open("wb") as file:
            file.write(bytes(1 << 20))
        assert strain(read, StrainKind.DISK_SHORT).text == f"disk {small} has 0 B left"
        subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
        assert strain(read, StrainKind.DISK_READ_ONLY).text == f"disk {small} can only be read"


@needs_root
def test_an_agent_says_that_its_disk_is_nearly_full(tmp_path):
    """A whole host: the sensor is part of it, the fold hears of it, the journal folds again."""
    waits = tmp_path / "waits.py"
    waits.write_text("import time\ntime.sleep(600)\n")
    with disk(tmp_path / "small", "64m") as small:
        (small / "data").write_bytes(bytes(65_000_000))
        words = ["local", "--hosts", "1", "--python", sys.executable, "--out", str(small / "run"), str(waits)]
        with (tmp_path / "log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "keepstep", *words],
                env={**os.environ, "PYTHONPATH": str(ROOT / "runtime")},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            said = wait_until(lambda: warning(tmp_path / "log"), "a word about the disk")
            assert "larger volume" in said
            (journal,) = wait_until(lambda: journals_under(small / "run"), "the journal")

            def posted() -> list[StrainsChanged]:
                events = [turn.event for turn in replay(journal)]
                return [event for event in events if isinstance(event, StrainsChanged)]

            assert any(str(small) in text for text in wait_until(posted, "its event")[0].strains)
        finally:
            process.terminate()
            process.wait(60)


def warning(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return next((line for line in lines if " | disk " in line), "")
