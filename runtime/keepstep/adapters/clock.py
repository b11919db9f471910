"""The only place of the agent that reads a clock.

Two scales: monotonic seconds (CLOCK_MONOTONIC, the same for all processes of a host: deadlines, the wire) and unix
seconds, which people and other hosts read. A `Clock` ties them together once, so that its unix time never steps.
"""

from __future__ import annotations

import asyncio
import os
import time


def monotonic() -> float:
    """Seconds of CLOCK_MONOTONIC; comparable between the processes of one host."""
    return time.monotonic()


def monotonic_ns() -> int:
    """Nanoseconds of CLOCK_MONOTONIC, as the wire has them."""
    return time.monotonic_ns()


def thread_cpu_time() -> float:
    """Seconds that the calling thread has had a processor."""
    return time.thread_time()


def unix_time() -> float:
    """Seconds since 1970 as the system has them now; may step when the system's clock is set."""
    return time.time()


def process_age_s(pid: int) -> float:
    """Seconds since a process was started, to a hundredth; 0 where there is none. Source: proc(5), /proc/pid/stat."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            ticks = int(stat.read().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


class Clock:
    """Unix time at the start plus what has passed since: it goes on evenly whatever happens to the system's clock."""

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()

    def now(self) -> float:
        """Unix seconds; never goes back."""
        return self.to_unix(time.monotonic())

    def monotonic(self) -> float:
        """Seconds of CLOCK_MONOTONIC."""
        return time.monotonic()

    def to_monotonic(self, now: float) -> float:
        """The monotonic second that this clock's `now` stands for: what a lease deadline is told init in."""
        return now - self._offset_s

    def to_unix(self, monotonic_s: float) -> float:
        """This clock's unix time of a monotonic second, as the wire's nanoseconds divided by 1e9."""
        return monotonic_s + self._offset_s


async def sleep(seconds: float) -> None:
    """Let `seconds` pass: to pace renewals, samples and attempts, never to wait for something to have happened."""
    await asyncio.sleep(seconds)
