"""The fork server: a process that has a worker's large imports behind it, and makes copies of itself that wait.

An import takes seconds of a processor's time, which the workers beside it do not have then; a copy takes hundredths.
A copy is no child of the fork server but of the agent, as every worker: it dies with that one, which sees its exit. To
that end it is forked twice while the agent is the one who is given orphans.
"""

from __future__ import annotations

import ctypes
import os
import signal
import stat
import sys
import threading
import warnings
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1
_EXIT_ORPHANED = 143
_MEMORY = 1
"""The major number of /dev/null and its like."""


def can_fork() -> bool:
    """Tell whether a copy of this process would be what the process is.

    Threads of Python's would be missing in it, and a driver that has been opened serves the process that has opened it.
    """
    return threading.active_count() == 1 and not any(map(_is_driver, os.listdir("/proc/self/fd")))


def _is_driver(fd: str) -> bool:
    try:
        status = os.fstat(int(fd))
    except OSError:  # what the list itself was read through
        return False
    return stat.S_ISCHR(status.st_mode) and os.major(status.st_rdev) != _MEMORY and not os.isatty(int(fd))


def fork(output_fd: int, error_fd: int) -> bool:
    """Make a copy of this process, which leads a session of its own; True in the copy.

    Args:
        output_fd: the copy's standard output; it is closed here.
        error_fd: the copy's standard error; it is closed here.

    Raises:
        OSError: there can be no more processes.
    """
    agent = os.getppid()
    adopted, adopts = os.pipe()
    try:
        between = _fork()
        if between:
            os.waitpid(between, 0)  # it has ended: from now on the copy is the agent's child
        else:
            _descend()
    finally:
        os.close(adopts)
    if not between:
        try:
            _become_copy(adopted, agent, (output_fd, error_fd))
        except OSError:
            os._exit(_EXIT_ORPHANED)
    for fd in (adopted, output_fd, error_fd):
        os.close(fd)
    return not between


def _descend() -> None:
    """Go on in a child of this process, which ends."""
    try:
        child = _fork()
    except OSError:
        os._exit(1)
    if child:
        os._exit(0)


def _become_copy(adopted: int, agent: int, outputs: Sequence[int]) -> None:
    os.setsid()
    os.read(adopted, 1)  # nothing is ever written: it ends
    die_with_parent(agent)
    for number, fd in enumerate(outputs, 1):
        os.dup2(fd, number)
    random = sys.modules.get("numpy.random")
    if random is not None:  # Python's own is begun anew by itself
        random.seed()


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends, and go at once where that has happened already.

    Args: parent_pid: who the parent is to be; 0 for whoever it is.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if parent_pid and os.getppid() != parent_pid:
        os._exit(_EXIT_ORPHANED)


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy's threads are known; its library makes them anew in a copy
        return os.fork()
