"""TensorFlow's profile is ended and written down so that the training can not die of it.

Where an activity ended on another thread than it began on, as those of collectives do, some TensorFlows collect it
through a pointer to memory that they have given back (`TraceMeRecorder::Consume`, seen in 2.21 under load): the process
may die of that. So a copy of this process collects the events and writes them down, in which nothing is given back; and
here the recording is switched off without a look at them. On GPUs, of which a copy of a process can not be asked, the
host's events are left out.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import mmap
import os
import platform
import resource
import signal
import time
import warnings
from collections.abc import Callable
from typing import Any

WRITES_S = 120
"""No copy lasts longer, whatever has become of this process: nobody waits for what it writes any more."""
STUCK_S = 10.0
"""A copy that got no processor for so long waits for a lock that another thread had held when it was made.

How long one writes says nothing: the worker that is asked for a profile may be the one that is short of processor time.
"""
WAITS_S = 30.0
"""So long the end of the training waits for a copy that is at work."""
_LOOK_EVERY_S = 0.05
_SAID_BYTES_MAX = 500
_CLOCK_OF_A_PROCESS = 2  # as clock_getcpuclockid(3) makes it of a process: what its threads have worked
_LANDING, _RETURN = bytes.fromhex("f30f1efa"), bytes.fromhex("c3")  # of x86-64: endbr64, ret
_READ, _WRITE, _RUN = 1, 2, 4
_LIBRARY, _SWITCH, _OFF = "libtensorflow_framework.so.2", "_ZN3tsl8profiler8internal13g_trace_levelE", -1


def begin(tensorflow: Any, folder: str) -> None:
    """Begin to record.

    Raises:
        Exception: whatever TensorFlow's profiler raises; another one may be under way.
    """
    profiler = tensorflow.profiler.experimental
    if switch_of(tensorflow) is not None and _on_gpus(tensorflow):
        profiler.start(folder, profiler.ProfilerOptions(host_tracer_level=0))
    else:
        profiler.start(folder)


def end(tensorflow: Any) -> Writer | None:
    """End what was begun, and have it written down; None where that is done already.

    Raises:
        Exception: whatever TensorFlow's profiler raises; an OSError where there can be no copy of this process.
    """
    stop = tensorflow.profiler.experimental.stop
    switch = None if _on_gpus(tensorflow) else switch_of(tensorflow)
    if switch is None:
        stop()
        return None
    try:
        return Writer(stop)
    finally:
        switch.value = _OFF
        stop(save=False)


class Writer:
    """A copy of this process that writes a profile down, and ends.

    Attributes:
        died: it was ended by TensorFlow's mistake, or met a lock: to try once more may help.
    """

    def __init__(self, stop: Callable[[], None]) -> None:
        """Args: stop: ends the profile and writes it; called in the copy.

        Raises:
            OSError: there is no room for a copy.
        """
        self.died = False
        self._worked_ns, self._worked_at_ns = -1, 0
        self._given_up = ""
        self._said, said = os.pipe()
        os.set_blocking(self._said, False)  # another process that was copied just now may have it open, too
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that a process with threads is copied is known: hence the alarm
                self._pid = os.fork()
            if not self._pid:
                _write(stop, said)
        except OSError:
            os.close(self._said)
            raise
        finally:
            os.close(said)

    def ended(self, wait: bool = False) -> str | None:
        """Why nothing was written, empty where it was; None while it writes. Not to be asked again then.

        Args: wait: for its end; what is not written down then within `WAITS_S` will not be.
        """
        give_up_ns = time.monotonic_ns() + int(WAITS_S * 1e9)
        while True:
            try:
                pid, status = os.waitpid(self._pid, os.WNOHANG)
            except ChildProcessError:  # the script waits for children by itself: what was said and is there will show
                pid, status = self._pid, 0
            if pid:
                return self._outcome(status)
            if self._is_stuck():
                self._give_up(f"it did nothing for {STUCK_S:g} s")
            elif wait and time.monotonic_ns() >= give_up_ns:
                self._give_up(f"it was not done {WAITS_S:g} s after it was waited for")
            if not wait:
                return None
            time.sleep(_LOOK_EVERY_S)

    def _outcome(self, status: int) -> str:
        wrong = _read(self._said)
        os.close(self._said)
        if not os.WIFSIGNALED(status):
            return wrong
        number = os.WTERMSIG(status)
        self.died = number != signal.SIGALRM
        return f"the process that writes it down was ended by signal {number}{self._given_up and f': {self._given_up}'}"

    def _give_up(self, why: str) -> None:
        self._given_up = self._given_up or why
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)

    def _is_stuck(self) -> bool:
        """Whether it has not been at work for long, as seen when this is called again and again."""
        now_ns = time.monotonic_ns()
        try:
            worked_ns = time.clock_gettime_ns(~self._pid << 3 | _CLOCK_OF_A_PROCESS)
        except OSError:  # it has just ended
            return False
        if worked_ns != self._worked_ns:
            self._worked_ns, self._worked_at_ns = worked_ns, now_ns
        return now_ns > self._worked_at_ns + STUCK_S * 1e9


def switch_of(tensorflow: Any) -> ctypes.c_int | None:
    """What all of TensorFlow asks whether to record; None of a TensorFlow that has no such thing."""
    try:
        library = ctypes.CDLL(os.path.join(tensorflow.sysconfig.get_lib(), _LIBRARY))
        return ctypes.c_int.in_dll(library, _SWITCH)
    except (OSError, ValueError):
        return None


def _on_gpus(tensorflow: Any) -> bool:
    return bool(tensorflow.config.list_logical_devices("GPU"))


def _read(said: int) -> str:
    try:
        return os.read(said, _SAID_BYTES_MAX).decode(errors="replace")
    except BlockingIOError:
        return ""


def _write(stop: Callable[[], None], said: int) -> None:
    """In the copy: it has this one thread, and never returns. What goes wrong is written to `said`."""
    try:
        faulthandler.disable()  # it would show this process's stack as if it were the worker's
        _keep_what_is_freed()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(WRITES_S)
        stop()
    except BaseException as error:
        os.write(said, f"{type(error).__name__}: {error}".encode()[:_SAID_BYTES_MAX])
    finally:
        os._exit(0)


def _keep_what_is_freed() -> None:
    """In the copy: `free` gives nothing back from here on, so that what TensorFlow still points to stays what it was.

    An activity that is written through such a pointer is not in the profile. Without this, two in five copies of a
    worker on a busy machine die of it. It takes memory: ten times as much as is written.
    """
    if platform.machine() != "x86_64":
        return
    library = ctypes.CDLL(None)
    code = ctypes.cast(library.free, ctypes.c_void_p).value or 0
    if ctypes.string_at(code, len(_LANDING)) == _LANDING:
        code += len(_LANDING)
    page = ctypes.c_void_p(code & -mmap.PAGESIZE)
    if not library.mprotect(page, ctypes.c_size_t(mmap.PAGESIZE), _READ | _WRITE | _RUN):
        ctypes.memmove(code, _RETURN, len(_RETURN))
