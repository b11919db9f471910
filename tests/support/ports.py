"""Ports of this machine, handed out so that tests that run side by side never get the same one."""

from __future__ import annotations

import fcntl
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from keepstep.app.local import is_free

_BLOCKS_FROM, _BLOCKS, _BLOCK = 12_000, 80, 100


@functools.cache
def _own_block() -> tuple[IO[str], Iterator[int]]:
    """A lock that this process holds while it lives, and the ports that are its own by that, over and over."""
    folder = Path("/tmp/keepstep-ports")
    folder.mkdir(mode=0o777, exist_ok=True)
    for block in range(_BLOCKS):
        lock = (folder / f"test-{block}").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            continue
        first = _BLOCKS_FROM + block * _BLOCK
        return lock, itertools.cycle(range(first, first + _BLOCK))
    raise OSError(f"all {_BLOCKS} blocks of ports are taken")


def free_port() -> int:
    """A port that nobody listens on and that no other test is given meanwhile.

    Below those that the kernel gives to whoever asks for any, so that none of them gets it before it is listened on.
    """
    _, ports = _own_block()
    return next(port for port in ports if is_free(port))
