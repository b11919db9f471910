"""Variables of every kind into a slab, and back into others; says which came back changed, and what else is wrong."""

from __future__ import annotations

import os
import re
import sys
import threading
from pathlib import Path
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


def mapped_in_kb() -> int:
    """How much of slabs this process has mapped in, once whoever maps them out has done so."""
    for thread in threading.enumerate():
        if thread.name == "keepstep-unmap":
            thread.join()
    found = re.findall(r"memfd:slab.*?^Rss: +(\d+) kB", Path("/proc/self/smaps").read_text(), re.MULTILINE | re.DOTALL)
    assert found
    return sum(map(int, found))


def is_refused(shape: Any) -> bool:
    variable = tf.Variable(((1.0, 2.0),), shape=tf.TensorShape(shape), name="open")
    try:
        state.tensors_of([("local/open", variable)], Blobs())
    except TypeError as error:
        return re.search("open can not be tracked: its shape, .* may change", str(error)) is not None
    return False


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
    left_kb = mapped_in_kb()
    wrong = [names[each] for each in saved if content(saved[each]) != content(restored[each])]
    assert all(variable.dtype.name == kind for (kind, _), variable in restored.items())
    again = tf.Variable(tf.zeros((300, 300)))
    view_of_one = [("replicated/float32/300x300", again)]
    state.assign(view, view_of_one, others=view.places)  # what was mapped out is read once more
    wrong += [key for key, variable in view_of_one if content(variable) != content(saved["float32", (300, 300)])]
    refused = [is_refused((None, 2)), is_refused(None)]
    print(f"{len(saved)} variables, wrong: {wrong}; {left_kb} kB mapped in; refused: {refused}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
