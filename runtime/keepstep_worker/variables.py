"""TensorFlow variables as tensors of a slab, and back.

What lives here: which variables belong to which class of state, how their bytes are read, and how a slab's bytes are
assigned. It works on what it is given: variables of Keras 3, of tf_keras, of a tf.Module. Only the local components of
a distributed variable are read and assigned, so no collective is involved and a rank needs no peer.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Sequence
from typing import Any

from keepstep_worker.session import RestoreError
from keepstep_worker.shares import in_shares
from keepstep_worker.slab import ALIGNMENT, DTYPES, LOCAL, REPLICATED, Place, SlabView, Tensor, fill

Named = tuple[str, Any]
"""A key, class included, and the variable that it stands for."""

_LISTED_MAX = 8
_LARGE_BYTES = 64 << 10
_LENT_TYPES = frozenset({"F64", "F32", "F16", "I64", "I32", "I16", "I8", "U8"})


def local_components(variable: Any) -> list[Any]:
    """Return this process's tf.Variables behind a variable of any kind, one per local replica.

    Only what an object holds itself is looked at: an attribute that a distributed variable does not have it looks up in
    its value, and to read the value of one that is summed on reading takes a collective, which needs every peer.
    """
    for name in ("_value", "_variable"):  # Keras 3; tf_keras under mixed precision
        inner = vars(variable).get(name)
        if inner is not None and hasattr(type(inner), "assign"):
            variable = inner
    values = vars(variable).get("_values")  # distributed
    return list(values) if isinstance(values, (list, tuple)) else [variable]


def name_of(variable: Any) -> str:
    """Return a variable's path in Keras 3, its name elsewhere."""
    path = getattr(variable, "path", None)
    return str(path) if path else str(variable.name).split(":")[0]


def name_variables(
    prefix: str, replicated: Iterable[Any], local: Iterable[Any] = (), taken: set[str] | None = None
) -> list[Named]:
    """Give variables unique keys; a variable listed twice counts once, as replicated where it stands in both lists.

    Args:
        prefix: what stands between class and name, as in `replicated/<prefix>/<name>`.
        replicated: variables that are equal on all ranks: trainable ones and optimizer slots.
        local: all others.
        taken: ids of variables that have a key already, as hexadecimal text; added to.
    """
    taken = set() if taken is None else taken
    named: list[Named] = []
    keys: set[str] = set()
    for kind, variables in ((REPLICATED, replicated), (LOCAL, local)):
        for variable in variables:
            identity = f"{id(local_components(variable)[0]):x}"
            if identity in taken:
                continue
            taken.add(identity)
            base = key = f"{kind}{prefix}/{name_of(variable)}" if prefix else f"{kind}{name_of(variable)}"
            count = 1
            while key in keys:
                count += 1
                key = f"{base}#{count}"
            keys.add(key)
            named.append((key, variable))
    return named


def name_model(prefix: str, model: Any, taken: set[str] | None = None) -> list[Named]:
    """Name the variables of a Keras model, layer or tf.Module, metrics and seed generators included."""
    others = [*model.variables, *(getattr(model, "metrics_variables", None) or ())]
    return name_variables(prefix, model.trainable_variables, others, taken)


def name_optimizer(prefix: str, optimizer: Any, taken: set[str] | None = None) -> list[Named]:
    """Name an optimizer's variables (iteration, learning rate, slots): all replicated."""
    variables = optimizer.variables
    return name_variables(prefix, variables() if callable(variables) else variables, (), taken)


def is_optimizer(thing: Any) -> bool:
    """Return whether this is an optimizer of Keras 3, of tf_keras, or of its legacy kind."""
    return hasattr(thing, "apply_gradients") and hasattr(thing, "variables")


def build_optimizer(optimizer: Any, trainable: list[Any]) -> None:
    """Create an optimizer's slots where its first step has not done so yet, in the strategy of the variables."""
    if getattr(optimizer, "built", False) or getattr(optimizer, "_built", False) or not trainable:
        return
    strategy = getattr(getattr(trainable[0], "_value", trainable[0]), "distribute_strategy", None)
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        if hasattr(optimizer, "build"):
            optimizer.build(trainable)
        else:  # tf_keras.optimizers.legacy
            _ = optimizer.iterations
            optimizer._create_all_weights(trainable)


def tensors_of(named: Iterable[Named]) -> list[Tensor]:
    """Describe variables as tensors, whose bytes are read at the moment a slab is written; the list can be kept.

    Of a replicated variable the first local component is saved, of a local one all: `<key>`, `<key>@1`, ...
    """
    tensors = []
    for key, variable in named:
        components = local_components(variable)
        for index, component in enumerate(components[:1] if key.startswith(REPLICATED) else components):
            name = key if index == 0 else f"{key}@{index}"
            tensors.append(Tensor(name, *_describe(component), functools.partial(_write, component)))
    return tensors


def assign(view: SlabView, named: Sequence[Named], others: Iterable[str] = ()) -> None:
    """Assign a slab's tensors to the variables, or nothing at all where the two sets do not match.

    Args:
        view: the slab to restore.
        named: every variable that the slab must hold.
        others: keys that the caller takes out of the slab itself.

    Raises:
        RestoreError: keys are missing or left over, or a shape or a type differs; it names them.
    """
    pairs = [(key, index, component) for key, variable in named for index, component in _components(key, variable)]
    wanted = {_stored_key(view, key, index) for key, index, _ in pairs}
    missing = sorted(wanted - set(view.places))
    spare = {key for key in view.places if "@" in key and key.rsplit("@", 1)[0] in wanted}
    extra = sorted(set(view.places) - wanted - set(others) - spare)
    wrong = []
    for key, index, component in pairs:
        place = view.places.get(_stored_key(view, key, index))
        if place is not None and place[1:3] != (described := _describe(component)):
            wrong.append(f"{key} (saved {place.dtype} {list(place.shape)}, now {described[0]} {list(described[1])})")
    if missing or extra or wrong:
        raise RestoreError(
            f"the state of step {view.step} does not fit what the script has built: "
            + "; ".join(
                f"{what}: {', '.join(found[:_LISTED_MAX])}"
                + (f" and {len(found) - _LISTED_MAX} more" * (len(found) > 8))
                for what, found in (("missing", missing), ("left over", extra), ("different", wrong))
                if found
            )
        )
    wanted_by = [(component, _stored_key(view, key, index)) for key, index, component in pairs]
    in_shares(wanted_by, [view.raw(key).nbytes for _, key in wanted_by], functools.partial(_assign_all, view))


def _components(key: str, variable: Any) -> list[tuple[int, Any]]:
    components = local_components(variable)
    if key.startswith(REPLICATED):
        return [(0, component) for component in components]
    return list(enumerate(components))


def _stored_key(view: SlabView, key: str, index: int) -> str:
    own = f"{key}@{index}"
    return own if index and own in view else key


def _describe(component: Any) -> tuple[str, tuple[int, ...]]:
    """Return dtype and shape as stored: raw bytes where safetensors has no name for the type."""
    dtype, shape = component.dtype, tuple(int(dimension) for dimension in component.shape)
    name = DTYPES.get(dtype.name)
    if name is not None:
        return name, shape
    count = dtype.size
    for dimension in shape:
        count *= dimension
    return "U8", (count,)


def _write(component: Any, target: memoryview) -> None:
    import numpy
    import tensorflow as tf

    # What read_value() does, without its name scope and identity: a sixth of the time, and no copy on the CPU.
    value = tf.raw_ops.ReadVariableOp(resource=component.handle, dtype=component.dtype)
    try:
        source = memoryview(value).cast("B")
    except (TypeError, ValueError, BufferError):  # a type that the buffer protocol has no code for
        source = memoryview(value.numpy().reshape(-1).view("uint8"))
    if target.nbytes < _LARGE_BYTES:
        fill(target, source)
    else:  # NumPy lets other threads run while it copies
        numpy.copyto(numpy.frombuffer(target, "uint8"), numpy.frombuffer(source, "uint8"))


def _assign_all(view: SlabView, wanted: Sequence[tuple[Any, str]]) -> None:
    import tensorflow as tf

    for component, key in wanted:
        # What assign() does, without its name scope and without reading back what was assigned.
        tf.raw_ops.AssignVariableOp(resource=component.handle, value=_value(component, view, key))


def _value(component: Any, view: SlabView, key: str) -> Any:
    """A tensor's value in memory of its own: the slab is written to again."""
    import numpy
    import tensorflow as tf

    dtype, shape = component.dtype.as_numpy_dtype, tuple(component.shape)
    place = view.places[key]
    if _may_be_lent(component, place) and key not in view.replaced and _copies_what_is_lent():
        lent = numpy.frombuffer(view.mapped(key), dtype=dtype).reshape(shape)
        return _copied(lent)
    raw = view.raw(key) if _takes_a_copy() else bytearray(view.raw(key))
    return tf.convert_to_tensor(numpy.frombuffer(raw, dtype=dtype).reshape(shape), dtype=component.dtype)


def _may_be_lent(component: Any, place: Place) -> bool:
    """Whether TensorFlow may look at a tensor where it lies: a large one of a type that both know, for the CPU."""
    large = place.end - place.begin >= _LARGE_BYTES and place.begin % ALIGNMENT == 0
    known = place.dtype in _LENT_TYPES and DTYPES.get(component.dtype.name) == place.dtype
    return large and known and str(component.device).endswith("CPU:0")


def _copied(lent: Any) -> Any:
    """A copy made by TensorFlow, which lets other threads run meanwhile."""
    import tensorflow as tf

    return tf.raw_ops.DeepCopy(x=tf.experimental.dlpack.from_dlpack(lent.__dlpack__()))


@functools.cache
def _copies_what_is_lent() -> bool:
    """Whether that is so with these versions of TensorFlow and NumPy; in those that were looked at, it is."""
    try:
        block = _aligned_block()
        tensor = _copied(block)
        block[:] = 1
        return not tensor.numpy().any()
    except Exception:  # whatever they raise: then it is done the other way
        return False


@functools.cache
def _takes_a_copy() -> bool:
    """Whether a tensor made from an array has memory of its own, as in all versions that were looked at."""
    import tensorflow as tf

    block = _aligned_block()
    tensor = tf.convert_to_tensor(block)
    block[:] = 1
    return not int(tensor[0])


def _aligned_block() -> Any:
    """Zeros of whose memory a tensor could be made."""
    import numpy

    block = numpy.zeros(1 << 16, "uint8")
    return block[-block.ctypes.data % ALIGNMENT :][: 1 << 15]
