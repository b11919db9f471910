"""Variables of every kind into a slab, and back into others; says which came back changed."""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

from keepstep_worker import variables as state
from keepstep_worker.slab import Blobs, Layout, Writer
from keepstep_worker.slab_view import SlabView

KINDS = (
    "float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "int8", "int16", "int32", "int64",
    "uint8", "uint16", "uint32", "uint64", "bool", "complex64", "complex128", "string",
)  # fmt: skip
SHAPES = ((), (0,), (3, 0), (5,), (2, 3), (300, 300))


def made(factor: int) -> dict[tuple[str, tuple[int, ...]], tf.Variable]:
    """A variable of each kind and shape, whose values are multiples of `factor`."""
    return {(kind, shape): tf.Variable(values(factor, shape, kind), name=kind) for kind in KINDS for shape in SHAPES}


def values(factor: int, shape: tuple[int, ...], kind: str) -> Any:
    numbers = np.asarray(np.arange(np.prod(shape, dtype=int)).reshape(shape) % 7 * factor + factor)
    if kind == "string":
        return tf.reshape(
            tf.constant([b"\xff" * number for number in numbers.reshape(-1)], "string", numbers.size), shape
        )
    return numbers.astype(tf.as_dtype(kind).as_numpy_dtype)


def content(variable: tf.Variable) -> Any:
    value = np.asarray(variable.numpy())
    return value.tolist() if value.dtype == object else value.tobytes()


def main() -> None:
    saved, restored = made(1), made(0)
    names = {each: f"replicated/{each[0]}/{'x'.join(map(str, each[1]))}" for each in saved}
    tensors = state.tensors_of([(names[each], variable) for each, variable in saved.items()], Blobs())
    layout = Layout(tensor[:3] for tensor in tensors)
    fd = os.memfd_create("slab")
    os.ftruncate(fd, layout.size_bytes)
    writer = Writer(fd, layout)
    writer.write(tensors)
    writer.close()
    view = SlabView.open(fd, layout.size_bytes, 1)
    state.assign(view, [(names[each], variable) for each, variable in restored.items()])
    wrong = [names[each] for each in saved if content(saved[each]) != content(restored[each])]
    assert all(variable.dtype.name == kind for (kind, _), variable in restored.items())
    print(f"{len(saved)} variables, wrong: {wrong}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
