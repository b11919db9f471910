"""A sealed slab, as its reader sees it."""

from __future__ import annotations

import importlib
import mmap
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Callable

from keepstep_worker import pages
from keepstep_worker.slab import DTYPES, Place, SlabError, parse, read_blob
from keepstep_worker.streaming import Source, source_of

_NAMES = {short: name for name, short in DTYPES.items()}


class RestoreError(Exception):
    """The state that the agent wants restored can not be had, or does not fit what the script has built."""


def numpy_dtype(dtype: str) -> Any:
    """Return NumPy's type for a safetensors name; what NumPy lacks comes from ml_dtypes, which TensorFlow brings."""
    import numpy

    name = _NAMES[dtype]
    if hasattr(numpy, name) or name == "bool":
        return numpy.dtype(name)
    return numpy.dtype(getattr(importlib.import_module("ml_dtypes"), name))


def _map_out(source: Source) -> None:
    pages.map_out(source.address, source.size_bytes)


class _File:
    """A descriptor of its own, closed when nobody has it any more."""

    def __init__(self, fd: int) -> None:
        self.fd = os.dup(fd)
        weakref.finalize(self, os.close, self.fd)

    def size_bytes(self) -> int:
        return os.fstat(self.fd).st_size


class SlabView:
    """A sealed slab, open for reading without a copy.

    Attributes:
        step: the completed step whose state it holds.
        places: where each tensor lies, by key, in file order.
        metadata: strings from the header.
        replaced: bytes to read instead of the file's, by key.
    """

    def __init__(
        self,
        step: int,
        places: dict[str, Place],
        metadata: dict[str, str],
        memory: memoryview,
        replaced: Mapping[str, bytes] | None = None,
        file: _File | None = None,
    ) -> None:
        self.step, self.places, self.metadata, self.memory = step, places, metadata, memory
        self.replaced = dict(replaced or {})
        self._file = file

    @classmethod
    def open(cls, fd: int, length_bytes: int, step: int) -> SlabView:
        """Map the first `length_bytes` of `fd` read-only and check the header.

        Raises:
            SlabError: it is no valid slab.
        """
        try:
            mapped = mmap.mmap(fd, length_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        except (ValueError, OSError) as error:
            raise SlabError(f"a slab of {length_bytes} bytes can not be mapped: {error}") from error
        memory = memoryview(mapped)
        places, metadata = parse(memory, length_bytes)
        return cls(step, places, metadata, memory, file=_File(fd))

    def with_bytes(self, replaced: Mapping[str, bytes]) -> SlabView:
        """Return the same with some tensors' bytes replaced."""
        return SlabView(self.step, self.places, self.metadata, self.memory, replaced, self._file)

    def __contains__(self, key: object) -> bool:
        return key in self.places

    def keys(self) -> list[str]:
        """Return the keys in file order."""
        return list(self.places)

    def raw(self, key: str) -> memoryview:
        """Return a tensor's bytes, read-only, without a copy."""
        if key in self.replaced:
            return memoryview(self.replaced[key])
        place = self.places[key]
        return self.memory[place.begin : place.end]

    def sources(self, keys: Sequence[str]) -> list[Source]:
        """Return where tensors' bytes are, for those who copy them.

        Raises:
            SlabError: the file has become shorter, and to read there would end the process.
        """
        end = self._file.size_bytes() if self._file is not None else len(self.memory)
        for key in keys:
            if key not in self.replaced and self.places[key].end > end:
                raise SlabError(f"it ends within {key}")
        return [source_of(self.raw(key)) for key in keys]

    def map_in(self, go_on: Callable[[], bool]) -> None:
        """Have all of the file mapped in, so that reading it meets no page fault."""
        if self._file is not None:
            pages.map_in(*pages.range_of(self.memory), go_on)

    def let_go(self) -> None:
        """Have what was read of the file mapped out, beside what comes next; what is read again is mapped in again.

        A page after the other: 0.8 GB were measured to take 25 ms.
        """
        if self._file is not None:
            read = source_of(self.memory)
            threading.Thread(target=_map_out, args=(read,), name="keepstep-unmap", daemon=True).start()

    def array(self, key: str) -> Any:
        """Return a tensor as a read-only NumPy array, without a copy: copy it before giving it to TensorFlow."""
        import numpy

        place = self.places[key]
        return numpy.frombuffer(self.raw(key), dtype=numpy_dtype(place.dtype)).reshape(place.shape)

    def blob(self, key: str) -> bytes:
        """Return what `blob` stored under the key.

        Raises:
            SlabError: its length does not fit.
        """
        return read_blob(self.raw(key), key)
