"""TensorFlow variables as tensors of a slab, and back.

What lives here: which variables belong to which class of state, how their bytes are read, and how a slab's bytes are
assigned. It works on what it is given: variables of Keras 3, of tf_keras, of a tf.Module. Only the local components of
a distributed variable are read and assigned, so no collective is involved and a rank needs no peer.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from keepstep_worker import reading, strings
from keepstep_worker.slab import DTYPES, LOCAL, REPLICATED, Blobs, Place, Tensor
from keepstep_worker.slab_view import RestoreError, SlabView
from keepstep_worker.streaming import Copying, pieces_in, source_of
from keepstep_worker.strings import is_string

Named = tuple[str, Any]
"""A key, class included, and the variable that it stands for."""

_LISTED_MAX = 8
_LARGE_BYTES = 64 << 10
_FILLED_TYPES = frozenset({"F64", "F32", "F16", "I64", "I32", "I16", "I8", "U8"})
_BATCH_BYTES = 8 << 20
_ALIGNMENT = 64
"""Of memory that TensorFlow computes with."""


def local_components(variable: Any) -> list[Any]:
    """Return this process's tf.Variables behind a variable of any kind, one per local replica.

    Only what an object holds itself is looked at: an attribute that a distributed variable does not have it looks up in
    its value, and to read the value of one that is summed on reading takes a collective, which needs every peer.
    """
    own = vars(variable)
    for name in ("_value", "_variable"):  # Keras 3; tf_keras under mixed precision
        if name in own and hasattr(type(own[name]), "assign"):
            variable = own[name]
            own = vars(variable)
    values = own.get("_values")  # distributed
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
            identity = _identity(variable)
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


def _identity(variable: Any) -> str:
    return f"{id(local_components(variable)[0]):x}"


def name_late(things: Mapping[str, Any], taken: set[str]) -> list[str]:
    """Name the variables that things have come to have since their variables got keys.

    Args:
        things: models, metrics and optimizers, by their prefixes.
        taken: ids of the variables that have a key.
    """
    late = []
    for prefix, thing in things.items():
        variables = thing.variables
        for variable in variables() if callable(variables) else variables:
            if _identity(variable) not in taken:
                late.append(f"{prefix}/{name_of(variable)}")
    return late


def name_model(prefix: str, model: Any, taken: set[str] | None = None) -> list[Named]:
    """Name the variables of a Keras model, layer or tf.Module, metrics and seed generators included.

    Raises:
        ValueError: it has none.
    """
    variables = model.variables
    if not variables:
        raise ValueError(f"{prefix} has no variables yet: build it before track()")
    others = [*variables, *(getattr(model, "metrics_variables", None) or ())]
    return name_variables(prefix, model.trainable_variables, others, taken)


def name_optimizer(prefix: str, optimizer: Any, taken: set[str] | None = None) -> list[Named]:
    """Name an optimizer's variables (iteration, learning rate, slots): all replicated."""
    variables = optimizer.variables
    return name_variables(prefix, variables() if callable(variables) else variables, (), taken)


def is_optimizer(thing: Any) -> bool:
    """Return whether this is an optimizer of Keras 3, of tf_keras, or of its legacy kind."""
    return hasattr(thing, "apply_gradients") and hasattr(thing, "variables")


def is_model(thing: Any) -> bool:
    """Return whether this is a model, a layer or a tf.Module; to have all of its variables listed takes its time."""
    own = getattr(thing, "__dict__", ())
    return all(hasattr(type(thing), name) or name in own for name in ("trainable_variables", "variables"))


def build_optimizer(optimizer: Any, things: Iterable[Any]) -> None:
    """Create an optimizer's slots where its first step has not done so yet, for what these things train."""
    if getattr(optimizer, "built", False) or getattr(optimizer, "_built", False):
        return
    trainable = [variable for thing in things for variable in getattr(thing, "trainable_variables", ())]
    if not trainable:
        return
    strategy = getattr(getattr(trainable[0], "_value", trainable[0]), "distribute_strategy", None)
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        if hasattr(optimizer, "build"):
            optimizer.build(trainable)
        else:  # tf_keras.optimizers.legacy
            _ = optimizer.iterations
            optimizer._create_all_weights(trainable)


def tensors_of(named: Iterable[Named], blobs: Blobs) -> list[Tensor]:
    """Describe variables as tensors, whose bytes are read at the moment a slab is written; the list can be kept.

    Of a replicated variable the first local component is saved, of a local one all: `<key>`, `<key>@1`, ...

    Args:
        named: the variables. Those of strings are read now: a list with any of them is of this moment.
        blobs: makes what strings are kept in.
    """
    tensors = []
    for key, variable in named:
        components = local_components(variable)
        for index, component in enumerate(components[:1] if key.startswith(REPLICATED) else components):
            name = key if index == 0 else f"{key}@{index}"
            if is_string(component):
                tensors.append(blobs.tensor(name, strings.encode(component)))
                continue
            write = functools.partial(reading.write, component)
            reader = reading.TOGETHER if reading.is_at_hand(component) else None
            tensors.append(Tensor(name, *_describe(component), write, reading.thing_of(component), reader))
    return tensors


class Described:
    """Variables as tensors, described once; those of strings anew each time, as their bytes differ in length."""

    def __init__(self, named: Sequence[Named], blobs: Blobs) -> None:
        """See `tensors_of`."""
        by_kind: tuple[list[Named], ...] = ([], [])
        for each in named:
            by_kind[is_string(local_components(each[1])[0])].append(each)
        self._named, self._blobs = named, blobs
        self._tensors, self._strings = tensors_of(by_kind[False], blobs), by_kind[True]

    def is_of(self, named: Sequence[Named]) -> bool:
        """Whether these are the very same variables, by the same keys."""
        return len(named) == len(self._named) and all(
            a is b or (a[0] == b[0] and a[1] is b[1]) for a, b in zip(named, self._named)
        )

    def tensors(self) -> list[Tensor]:
        """Return them as of this moment."""
        return [*self._tensors, *tensors_of(self._strings, self._blobs)]


def assign(
    view: SlabView,
    named: Sequence[Named],
    others: Iterable[str] = (),
    before: Callable[[list[Any]], None] | None = None,
) -> None:
    """Assign a slab's tensors to the variables, or nothing at all where the two sets do not match.

    Args:
        view: the slab to restore.
        named: every variable that the slab must hold.
        others: keys that the caller takes out of the slab itself.
        before: called with the tf.Variables once they are sure to be assigned to.

    Raises:
        RestoreError: keys are missing or left over, or a shape or a type differs; it names them.
    """
    pairs = [
        (component, _stored_key(view, key, index))
        for key, variable in named
        for index, component in _components(key, variable)
    ]
    wanted = {key for _, key in pairs}
    missing = sorted(wanted - view.places.keys())
    spare = {key for key in view.places if "@" in key and key.rsplit("@", 1)[0] in wanted}
    extra = sorted(view.places.keys() - wanted - set(others) - spare)
    wrong = []
    for component, key in pairs:
        if (place := view.places.get(key)) is not None and (now := _difference(view, key, component)):
            wrong.append(f"{key} (saved {place.dtype} {list(place.shape)}, now {now})")
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
    if before is not None:
        before([component for component, _ in pairs])
    _assign_all(view, pairs)


def _difference(view: SlabView, key: str, component: Any) -> str:
    """What a variable is that can not take what was saved; empty where it can."""
    if is_string(component):
        return "" if strings.fits(component, view.raw(key)) else f"string {list(component.shape)}"
    dtype, shape = _describe(component)
    return "" if view.places[key][1:3] == (dtype, shape) else f"{dtype} {list(shape)}"


def _components(key: str, variable: Any) -> list[tuple[int, Any]]:
    components = local_components(variable)
    if key.startswith(REPLICATED):
        return [(0, component) for component in components]
    return list(enumerate(components))


def _stored_key(view: SlabView, key: str, index: int) -> str:
    return own if index and (own := f"{key}@{index}") in view else key


def _describe(component: Any) -> tuple[str, tuple[int, ...]]:
    """Return dtype and shape as stored: raw bytes where safetensors has no name for the type.

    Raises:
        TypeError: its shape may change.
    """
    if not component.shape.is_fully_defined():
        raise TypeError(f"{name_of(component)} can not be tracked: its shape, {component.shape}, may change")
    dtype, shape = component.dtype, tuple(component.shape.as_list())
    name = DTYPES.get(dtype.name)
    if name is not None:
        return name, shape
    count = dtype.size
    for dimension in shape:
        count *= dimension
    return "U8", (count,)


def _assign_all(view: SlabView, wanted: Sequence[tuple[Any, str]]) -> None:
    """Batch by batch: what a batch's variables held before is free memory for the next, and needs no page fault."""
    import tensorflow as tf

    begin, held = 0, 0
    for end, (_, key) in enumerate(wanted, 1):
        place = view.places[key]
        held += place.end - place.begin
        if held < _BATCH_BYTES and end < len(wanted):
            continue
        empty: list[tuple[Any, str]] = []
        with tf.device("CPU:0"):
            values = [_value(component, view, key, empty) for component, key in wanted[begin:end]]
        _fill(view, empty)
        for (component, _), value in zip(wanted[begin:end], values):
            # What assign() does, without its name scope and without reading back what was assigned.
            tf.raw_ops.AssignVariableOp(resource=component.handle, value=value)
        begin, held = end, 0
    view.let_go()


def _value(component: Any, view: SlabView, key: str, empty: list[tuple[Any, str]]) -> Any:
    """A tensor in memory of its own, as the slab is written to again; added to `empty` where its bytes are missing."""
    import numpy
    import tensorflow as tf

    if is_string(component):
        return strings.decode(view.blob(key))
    place, dtype, shape = view.places[key], component.dtype, component.shape
    if place.end - place.begin >= _LARGE_BYTES and _may_be_filled(component, place) and _fills():
        value = tf.raw_ops.Empty(shape=_dimensions(place.shape), dtype=dtype)
        empty.append((value, key))
        return value
    raw = view.raw(key)
    array = numpy.frombuffer(raw if _takes_a_copy() else bytearray(raw), dtype=dtype.as_numpy_dtype)
    return tf.convert_to_tensor(array.reshape(tuple(shape)), dtype=dtype)


def _may_be_filled(component: Any, place: Place) -> bool:
    """Whether a tensor's memory can be written to from outside: one of a type that both know, on the CPU."""
    known = place.dtype in _FILLED_TYPES and DTYPES.get(component.dtype.name) == place.dtype
    return known and reading.is_on_the_cpu(component)


@functools.lru_cache(maxsize=1024)
def _dimensions(shape: tuple[int, ...]) -> Any:
    import tensorflow as tf

    return tf.constant(shape, dtype="int32")


def _fill(view: SlabView, empty: Sequence[tuple[Any, str]]) -> None:
    sources = view.sources([key for _, key in empty])
    with Copying(pieces_in(source.size_bytes for source in sources)) as copying:
        for (value, _), source in zip(empty, sources):
            copying.give(_address_of(value), source)


def _address_of(value: Any) -> int:
    """Where a tensor's memory is, to write to: that is allowed only as long as nobody has seen it."""
    return source_of(value).address


@functools.cache
def _fills() -> bool:
    """Whether TensorFlow sees what is written to a tensor's memory; in all versions that were looked at, it does."""
    import tensorflow as tf

    try:
        with tf.device("CPU:0"):
            value = tf.raw_ops.Empty(shape=_dimensions((_LARGE_BYTES,)), dtype="uint8")
        ctypes.memmove(_address_of(value), bytes(range(256)) * (_LARGE_BYTES >> 8), _LARGE_BYTES)
        doubled = bytes(tf.raw_ops.AddV2(x=value, y=value).numpy())
        return doubled == bytes(range(0, 256, 2)) * (_LARGE_BYTES >> 7)
    except Exception:  # whatever they raise: then it is done the other way
        return False


@functools.cache
def _takes_a_copy() -> bool:
    """Whether a tensor made from an array has memory of its own, as in all versions that were looked at."""
    import numpy
    import tensorflow as tf

    block = numpy.zeros(1 << 16, "uint8")
    aligned = block[-block.ctypes.data % _ALIGNMENT :]  # only such memory can be kept
    tensor = tf.convert_to_tensor(aligned)
    aligned[:] = 1
    return not int(tensor[0])
