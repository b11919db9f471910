"""Slabs for tests: safetensors files as a worker seals them."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping


def slab_bytes(tensors: Mapping[str, bytes], pad: int = 0) -> bytes:
    """A slab of byte tensors in the order given."""
    header, data = {}, b""
    for name, content in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(content)], "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode() + b" " * pad
    return len(text).to_bytes(8, "little") + text + data


def memory_file(content: bytes = b"") -> int:
    """A memfd with that content; the caller closes it."""
    fd = os.memfd_create("slab", os.MFD_CLOEXEC)
    view, at = memoryview(content), 0
    while at < len(content):
        at += os.pwrite(fd, view[at:], at)
    return fd


def held(fd: int) -> int:
    """How many descriptors of this process hold that file. What others open or close meanwhile does not count."""
    this, count = os.fstat(fd), 0
    for other in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            count += os.path.samestat(this, os.fstat(int(other)))
    return count


def file_bytes(fd: int) -> bytes:
    """The whole content of a file."""
    return os.pread(fd, os.fstat(fd).st_size, 0)
