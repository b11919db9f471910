"""Whether a state that was restored is one to go on from: a NaN in what is trained never goes away again."""

from __future__ import annotations

from collections.abc import Iterable

from keepstep_worker.slab import ITEM_BYTES, REPLICATED, Tensor

_LOOKED_AT = 1024
"""Numbers of each variable: where one gradient is NaN, a step makes all of its variable so."""
_LISTED_MAX = 3
_WIDER = {"BF16": ("uint16", 0x7F80, 0x007F)}
"""A type that NumPy has no name for: the one to read it as, the bits of an exponent that is full, and the rest."""
_KINDS = {"F64": "float64", "F32": "float32", "F16": "float16"}


class Unsound(Exception):
    """A state made NaN of what is trained in its first step; whoever meets this twice goes on from an older one."""


def demand(tensors: Iterable[Tensor], step: int, restored: int) -> None:
    """See that a step has left numbers.

    Args:
        tensors: the state.
        step: the one that was executed.
        restored: the step whose state it began with.

    Raises:
        Unsound: there is a NaN; it names where.
    """
    found = _not_numbers(tensors)
    if found:
        raise Unsound(f"step {step}, the first from the state of step {restored}, has left NaN in {found}")


def _not_numbers(tensors: Iterable[Tensor]) -> str:
    """Name those of the replicated variables that begin with a NaN; empty where there are none."""
    from keepstep_worker import reading

    looked_at = [
        tensor
        for tensor in tensors
        if tensor.thing is not None and tensor.key.startswith(REPLICATED) and tensor.dtype in (*_KINDS, *_WIDER)
    ]
    found = []
    for tensor, first in zip(looked_at, reading.read_first([tensor.thing for tensor in looked_at], _LOOKED_AT)):
        if _has_nan(tensor.dtype, first[: len(first) // ITEM_BYTES[tensor.dtype] * ITEM_BYTES[tensor.dtype]]):
            found.append(tensor.key[len(REPLICATED) :])
    more = f" and {len(found) - _LISTED_MAX} more" if len(found) > _LISTED_MAX else ""
    return ", ".join(found[:_LISTED_MAX]) + more


def _has_nan(dtype: str, raw: bytes) -> bool:
    import numpy

    if dtype in _KINDS:
        return bool(numpy.isnan(numpy.frombuffer(raw, _KINDS[dtype])).any())
    kind, exponent, fraction = _WIDER[dtype]
    bits = numpy.frombuffer(raw, kind)
    return bool((((bits & exponent) == exponent) & ((bits & fraction) != 0)).any())
