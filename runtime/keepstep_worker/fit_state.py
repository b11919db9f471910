"""What a `fit` has to remember beside its variables: random generators, callbacks, logs.

Everything here is encoded by `codec`, which never runs code. A callback's attributes are kept where they changed since
the training began, so that what the script configured stays what the script says.
"""

from __future__ import annotations

import random
import struct
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import FunctionType
from typing import Any

from keepstep_worker import codec, newcomer
from keepstep_worker.slab import DTYPES, LOCAL, Blobs, Tensor, fill, size_bytes
from keepstep_worker.slab_view import SlabView

RANDOM = LOCAL + "keepstep/random"
"""The key of the states of the process's own generators; fingerprints of them are below it."""
_FINGERPRINT_BYTES = 16

_FUNCTION = "keepstep.function"
_ARRAY = "keepstep.array"
_FUNCTIONS_OF = ("keras", "tf_keras", "numpy", "tensorflow")
_ARRAY_BYTES_MIN = 4096
"""Arrays from this size on become tensors of their own."""
_NOT_STATE = frozenset({"model", "_model", "params", "validation_data"})
_PROGRESS_BAR, _CSV_LOGGER = "ProgbarLogger", "CSVLogger"
_MERSENNE = struct.Struct("<625I")


# --- random generators ---


def random_state() -> dict[str, Any]:
    """Return the state of the generators of Python, NumPy and TensorFlow's eager context."""
    import numpy

    state = {"python": _pack(random.getstate()), "numpy": numpy.random.get_state(legacy=False)}
    generator = _context_generator()
    if generator is not None:
        state["tensorflow"] = _pack(generator.getstate())
    return state


def random_tensors(blobs: Blobs) -> list[Tensor]:
    """Return what `random_state` returns as a tensor, and beside it a fingerprint of each generator's state.

    By the fingerprints it can be told, without reading the states, in which of them ranks differ.
    """
    encoded = {name: codec.dumps(each) for name, each in random_state().items()}
    tensors = [blobs.tensor(RANDOM, codec.join(encoded))]
    for name, each in encoded.items():
        write = partial(fill, source=newcomer.fold(each, 0, _FINGERPRINT_BYTES))
        tensors.append(Tensor(f"{RANDOM}/{name}", "U8", (_FINGERPRINT_BYTES,), write))
    return tensors


def restore_random_from(view: SlabView, rank: int) -> None:
    """Set the generators to what `random_tensors` has put into a slab; a rank that is new splits what is to be split.

    A generator of NumPy of another kind than its default one (MT19937) can not be split, and is set as it was.

    Raises:
        KeyError: the slab has no such state.
    """
    state = codec.loads(view.blob(RANDOM))
    restore_random_state(state)
    for name in newcomer.to_split(view, {name: f"{RANDOM}/{name}" for name in state}):
        _split(name, newcomer.fold(codec.dumps(state[name]), rank, 32))


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Set the generators to what `random_state` returned, or some of them to their part of it."""
    import numpy

    if "python" in state:
        random.setstate(_unpack(state["python"]))
    if "numpy" in state:
        numpy.random.set_state(state["numpy"])
    generator = _context_generator()
    if generator is not None and "tensorflow" in state:
        generator.setstate(_unpack(state["tensorflow"]))


def _split(name: str, seed: bytes) -> None:
    import numpy

    generator = _context_generator()
    if name == "python":
        random.seed(seed)
    elif name == "numpy" and numpy.random.get_state(legacy=False)["bit_generator"] == "MT19937":
        numpy.random.seed(numpy.frombuffer(seed, "uint32"))
    elif name == "tensorflow" and generator is not None:
        generator.seed(seed)


def _context_generator() -> random.Random | None:
    """The source of the seeds that TensorFlow gives to eager operations, where a global seed is set."""
    from tensorflow.python.eager import context

    generator = getattr(context.context(), "_rng", None)
    return generator if isinstance(generator, random.Random) else None


def tensorflow_generator(make: bool) -> dict[str, Any]:
    """Return the state variable of TensorFlow's global generator by name, where it exists or is to be made."""
    from tensorflow.python.ops import stateful_random_ops

    generator = getattr(stateful_random_ops, "global_generator", None)
    if generator is None and make:
        generator = stateful_random_ops.get_global_generator()
    return {} if generator is None else {"tensorflow": generator.state}


def _pack(state: Any) -> tuple[int, bytes, Any]:
    version, words, gauss = state
    return version, _MERSENNE.pack(*words), gauss


def _unpack(state: Any) -> Any:
    version, words, gauss = state
    return version, _MERSENNE.unpack(words), gauss


# --- callbacks ---


class CallbackStates:
    """The callbacks of one training: what changed in them, and how it is put back.

    Callbacks are told apart by their place in the list and their class.
    """

    def __init__(self, callbacks: Iterable[Any]) -> None:
        """Note how the callbacks look as the training begins."""
        self._callbacks = [each for each in callbacks if type(each).__name__ != _PROGRESS_BAR]
        self._configured: list[dict[str, tuple[bytes | None, dict[str, int]]]] = []
        for index, callback in enumerate(self._callbacks):
            look = {}
            for name, value in _attributes(callback):
                arrays: dict[str, Any] = {}
                picked = _picked(value, arrays, _key(index, name))
                look[name] = picked, {key: _checksum(array) for key, array in arrays.items()}
            self._configured.append(look)

    def save(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Return what changed, ready for `codec`, and the large arrays in it by key."""
        states, arrays = [], {}
        for index, callback in enumerate(self._callbacks):
            changed = {}
            for name, value in _attributes(callback):
                large: dict[str, Any] = {}
                picked = _picked(value, large, _key(index, name))
                before, checksums = self._configured[index].get(name, (None, {}))
                same = picked == before and all(_checksum(large[key]) == checksums[key] for key in large)
                if picked is not None and not same:
                    changed[name] = picked
                    arrays.update(large)
            states.append({"class": type(callback).__name__, "attributes": changed})
        return states, arrays

    def restore(self, states: list[dict[str, Any]], array: Callable[[str], Any]) -> None:
        """Put back what `save` returned; a callback that the script no longer has is passed over.

        Args:
            states: the first part of what `save` returned.
            array: returns a large array by its key, for the callback to keep.
        """
        for callback, state in zip(self._callbacks, states):
            if type(callback).__name__ != state["class"]:
                print(f"keepstep: no state for callback {type(callback).__name__}", file=sys.stderr)
                continue
            for name, value in state["attributes"].items():
                _put(callback, name, _resolved(codec.loads(value), array))


def _put(callback: Any, name: str, value: Any) -> None:
    """Give a callback its attribute back; a collection stays the one that the script may hold, too."""
    kept = vars(callback).get(name)
    if type(kept) is type(value) and isinstance(kept, (list, deque)) and _maxlen_of(kept) == _maxlen_of(value):
        kept.clear()
        kept.extend(value)
    elif type(kept) is type(value) and isinstance(kept, (dict, set)):
        kept.clear()
        kept.update(value)
    elif type(kept) is type(value) and hasattr(kept, "bit_generator"):
        kept.bit_generator.state = value.bit_generator.state
    elif type(kept) is type(value) and hasattr(kept, "tobytes") and _is_filled(kept, value):
        kept[...] = value
    else:
        setattr(callback, name, value)


def _is_filled(array: Any, value: Any) -> bool:
    """Whether an array of NumPy's can take another one's values."""
    return bool(array.shape) and (array.shape, array.dtype) == (value.shape, value.dtype) and array.flags.writeable


def _maxlen_of(items: Any) -> int | None:
    """How long a collection may become, None where there is no limit."""
    return getattr(items, "maxlen", None)


def give_back(callbacks: Any, model: Any, history: type, record: Mapping[str, Any]) -> Any:
    """Have a finished fit's callbacks be as they were at its end; returns its History, made where there is none.

    Args:
        callbacks: what `fit` was given.
        model: the model that was fitted.
        history: the class.
        record: what was kept of the fit.
    """
    whole = flat(callbacks)
    found = next((each for each in whole if isinstance(each, history)), None)
    if found is None:
        whole.append(found := history())
    for callback in whole:
        callback.set_model(model)
        callback.set_params(record["params"])
    CallbackStates(whole).restore(record["callbacks"], record["arrays"].__getitem__)
    model.history = found
    return found


def have_go_on(callbacks: Any) -> None:
    """Have those of a fit's callbacks that begin a file anew with each training go on with the one that is there."""
    for callback in flat(callbacks):
        if type(callback).__name__ == _CSV_LOGGER:
            callback.append = True


def flat(callbacks: Any) -> list[Any]:
    """Return what `fit` was given as `callbacks` as a flat list."""
    if callbacks is None:
        return []
    if isinstance(callbacks, (list, tuple)):
        return [each for item in callbacks for each in flat(item)]
    return list(callbacks.callbacks) if hasattr(callbacks, "callbacks") else [callbacks]


def _key(index: int, name: str) -> str:
    return f"{LOCAL}callbacks/{index}/{name}"


def _checksum(array: Any) -> int:
    return zlib.crc32(array.tobytes())


def _attributes(callback: Any) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in vars(callback).items() if name not in _NOT_STATE]


def _picked(value: Any, arrays: dict[str, Any], key: str) -> bytes | None:
    """Return the value encoded, None where it can not be kept; large arrays go to `arrays` instead."""
    try:
        return codec.dumps(_with_references(value, arrays, key))
    except (codec.CodecError, RecursionError):
        return None


def _with_references(value: Any, arrays: dict[str, Any], key: str) -> Any:
    """Replace what `codec` can not hold or should not: functions of Keras by name, large arrays by key."""
    kind = type(value)
    if kind is list or kind is tuple:
        return kind(_with_references(item, arrays, f"{key}/{index}") for index, item in enumerate(value))
    if kind is dict:
        return {name: _with_references(item, arrays, f"{key}/{name}") for name, item in value.items()}
    if kind is FunctionType and value.__module__.split(".")[0] in _FUNCTIONS_OF:
        module, name = value.__module__, value.__name__
        if getattr(sys.modules.get(module), name, None) is value:
            return {_FUNCTION: f"{module}:{name}"}
    if kind.__name__ == "ndarray" and value.nbytes >= _ARRAY_BYTES_MIN and value.dtype.name in DTYPES:
        arrays[key] = value
        return {_ARRAY: key}
    return value


def _resolved(value: Any, array: Callable[[str], Any]) -> Any:
    kind = type(value)
    if kind is list or kind is tuple:
        return kind(_resolved(item, array) for item in value)
    if kind is not dict:
        return value
    if _ARRAY in value:
        return array(value[_ARRAY])
    if _FUNCTION in value:
        module, _, name = value[_FUNCTION].partition(":")
        if module.split(".")[0] not in _FUNCTIONS_OF:
            raise ValueError(f"a function of {module} is none of Keras's")
        return getattr(sys.modules[module], name)
    return {name: _resolved(item, array) for name, item in value.items()}


# --- logs and tensors ---


def plain_logs(logs: Any) -> dict[str, Any]:
    """Return a step's logs with numbers in place of tensors, without what can not be kept."""
    plain = {}
    for name, value in (logs or {}).items():
        if isinstance(value, Mapping):
            plain[name] = plain_logs(value)
        else:
            plain[name] = value.numpy() if hasattr(value, "numpy") else value
    return keepable(plain)


def keepable(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that `codec` can hold."""
    return {name: value for name, value in values.items() if _picked(value, {}, name) is not None}


def array_tensor(key: str, value: Any) -> Tensor:
    """Return a large array of a callback as a tensor."""
    import numpy

    contiguous = numpy.ascontiguousarray(value)

    def write(target: memoryview) -> None:
        fill(target, contiguous.reshape(-1).view("uint8"))

    return Tensor(key, DTYPES[value.dtype.name], tuple(value.shape), write)


def held(tensor: Tensor) -> Tensor:
    """Return a tensor that keeps its present bytes, whatever becomes of the variable."""
    kept = bytearray(size_bytes(tensor.dtype, tensor.shape))
    tensor.write(memoryview(kept))

    def write(target: memoryview) -> None:
        fill(target, kept)

    return tensor._replace(write=write, thing=None, reader=None)
