"""The bytes of TensorFlow's variables: of many at a time, and of one."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from keepstep_worker import streaming
from keepstep_worker.pages import range_of
from keepstep_worker.slab import Reader
from keepstep_worker.streaming import Source, source_of

_LARGE_BYTES = 64 << 10
_READ_FIRST, _READ_MAX = 8, 128


def write(component: Any, target: memoryview) -> None:
    """Write the present value of a tf.Variable, wherever it lies."""
    streaming.copy(target, _source_of(_read(component)))


def thing_of(component: Any) -> Any:
    """What `TOGETHER` reads a tf.Variable from: itself, and what TensorFlow calls its type."""
    return component, component.dtype.base_dtype.as_datatype_enum


def _read_all(things: Iterable[Any]) -> Iterator[list[Any]]:
    waiting, count = iter(things), _READ_FIRST
    while batch := list(itertools.islice(waiting, count)):  # what is there is copied while more are read
        values = _values_of(*zip(*batch))
        yield values if _are_shared() else [_bytes_of(value) for value in values]
        count = min(2 * count, _READ_MAX)


def read_first(things: Sequence[Any], count: int) -> Iterator[bytes]:
    """Yield the first bytes of each present value, wherever it lies: of `count` numbers, fewer where it has fewer."""
    import tensorflow as tf

    at_hand = [thing for thing in things if is_at_hand(thing[0])]
    values = iter(_values_of(*zip(*at_hand)) if at_hand else ())
    for component, _ in things:
        if is_at_hand(component):
            yield bytes(_bytes_of(next(values))[: count * component.dtype.size])
        else:
            yield bytes(_bytes_of(tf.reshape(_read(component), [-1])[:count]))


def is_on_the_cpu(component: Any) -> bool:
    return str(component.device).endswith("CPU:0")


def is_at_hand(component: Any) -> bool:
    """Whether a variable is in this process's memory: what is on a parameter server several threads fetch faster."""
    device = str(component.device)
    return device.endswith("CPU:0") and "/job:ps/" not in device


def _values_of(components: Sequence[Any], kinds: Sequence[int]) -> list[Any]:
    """The present values, by one operation of TensorFlow's: one for each variable was measured to take ten times as
    long.

    The operation is TensorFlow's own for what its functions capture, and not for the public: without it they are read
    one by one.
    """
    try:
        import tensorflow as tf
        from tensorflow.python.eager import context, execute

        count = len(components)
        with tf.device("CPU:0"):
            return list(execute.quick_execute(
                b"_ReadVariablesOp", count, [component.handle for component in components],
                ("N", count, "dtypes", list(kinds)), context.context(),
            ))  # fmt: skip
    except Exception:  # what reading one by one does not get over is told by that
        return [_read(component) for component in components]


def _read(component: Any) -> Any:
    import tensorflow as tf

    # What read_value() does, without its name scope and identity: a sixth of the time, and no copy on the CPU.
    return tf.raw_ops.ReadVariableOp(resource=component.handle, dtype=component.dtype)


def _bytes_of(value: Any) -> memoryview:
    """A tensor's bytes, which last as long as they are held."""
    try:
        return memoryview(value).cast("B")
    except (TypeError, ValueError, BufferError):  # a type that the buffer protocol has no code for
        return memoryview(value.numpy().reshape(-1).view("uint8"))


def _source_of(value: Any) -> Source:
    try:
        return source_of(value)
    except (TypeError, ValueError, BufferError):  # the same, or there are no bytes
        return source_of(_bytes_of(value))


@functools.cache
def _are_shared() -> bool:
    """Whether whoever asks a value for its bytes is given its own, no copy; in all versions looked at, they are."""
    import tensorflow as tf

    try:
        with tf.init_scope(), tf.device("CPU:0"):
            value = tf.zeros((_LARGE_BYTES,), "uint8")
        with memoryview(value) as held:
            return range_of(held) == range_of(value)
    except Exception:  # whatever they raise: then it is done the other way
        return False


@functools.cache
def are_left_alone() -> bool:
    """Whether a value that was read stays as it is when its variable changes; in all versions looked at, it does."""
    import tensorflow as tf

    try:
        with tf.init_scope(), tf.device("CPU:0"):
            shape = (_LARGE_BYTES,)
            handle = tf.raw_ops.VarHandleOp(dtype="uint8", shape=shape, shared_name="keepstep/held", container="")
            tf.raw_ops.AssignVariableOp(resource=handle, value=tf.zeros(shape, "uint8"))
            before = memoryview(tf.raw_ops.ReadVariableOp(resource=handle, dtype="uint8"))
            tf.raw_ops.AssignAddVariableOp(resource=handle, value=tf.ones(shape, "uint8"))
            after = tf.raw_ops.ReadVariableOp(resource=handle, dtype="uint8")
            tf.raw_ops.DestroyResourceOp(resource=handle)
        return not any(before) and int(after[0]) == 1
    except Exception:  # whatever they raise: then it is done the other way
        return False


TOGETHER = Reader(_read_all, _source_of, are_left_alone)
"""Reads variables on the CPU of this process. On another device their values would take as much again of its memory."""
