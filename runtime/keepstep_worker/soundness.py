"""Whether a state that was restored is one to go on from: a NaN in what is trained never goes away again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

from keepstep_worker.slab import ITEM_BYTES, REPLICATED, Tensor
from keepstep_worker.slab_view import RestoreError, SlabView

_LOOKED_AT = 1024
"""Numbers of each variable: where one gradient is NaN, a step makes all of its variable so."""
_LISTED_MAX = 3
_WIDER = {"BF16": ("uint16", 0x7F80, 0x007F)}
"""A type that NumPy has no name for: the one to read it as, the bits of an exponent that is full, and the rest."""
_KINDS = {"F64": "float64", "F32": "float32", "F16": "float16"}


class Unsound(Exception):
    """A state made NaN of what is trained in its first step; whoever meets this twice goes on from an older one."""


def demand(tensors: Iterable[Tensor], step: int, restored: int, before: Callable[[], SlabView]) -> None:
    """See that a step has left numbers where there were some: who trains on with NaN did so before, too.

    Args:
        tensors: the state.
        step: the one that was executed.
        restored: the step whose state it began with.
        before: returns that state, or raises RestoreError where it is not there any more.

    Raises:
        Unsound: there is a NaN; it names where.
    """
    found = _not_numbers(tensors)
    if found:
        with contextlib.suppress(RestoreError):
            view = before()
            found = [key for key in found if key not in view or not _began_with_nan(view, key)]
    if found:
        names = ", ".join(key[len(REPLICATED) :] for key in found[:_LISTED_MAX])
        names += f" and {len(found) - _LISTED_MAX} more" if len(found) > _LISTED_MAX else ""
        raise Unsound(f"step {step}, the first from the state of step {restored}, has left NaN in {names}")


def _began_with_nan(view: SlabView, key: str) -> bool:
    dtype = view.places[key].dtype
    return _has_nan(dtype, bytes(view.raw(key)[: _LOOKED_AT * ITEM_BYTES[dtype]]))


def _not_numbers(tensors: Iterable[Tensor]) -> list[str]:
    """The keys of those replicated variables that begin with a NaN."""
    from keepstep_worker import reading

    looked_at = [
        tensor
        for tensor in tensors
        if tensor.thing is not None and tensor.key.startswith(REPLICATED) and tensor.dtype in (*_KINDS, *_WIDER)
    ]
    found = []
    for tensor, first in zip(looked_at, reading.read_first([tensor.thing for tensor in looked_at], _LOOKED_AT)):
        if _has_nan(tensor.dtype, first[: len(first) // ITEM_BYTES[tensor.dtype] * ITEM_BYTES[tensor.dtype]]):
            found.append(tensor.key)
    return found


def _has_nan(dtype: str, raw: bytes) -> bool:
    import numpy

    if dtype in _KINDS:
        return bool(numpy.isnan(numpy.frombuffer(raw, _KINDS[dtype])).any())
    kind, exponent, fraction = _WIDER[dtype]
    bits = numpy.frombuffer(raw, kind)
    return bool((((bits & exponent) == exponent) & ((bits & fraction) != 0)).any())
