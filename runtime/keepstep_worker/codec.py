"""Small values as JSON and back: what a callback, a data position or a random generator has to remember.

What JSON lacks is tagged: tuples, bytes, sets, the collections of the standard library, NumPy arrays, scalars and
generators, dictionaries with keys that are no strings.
Reading it never runs code, unlike pickle. NumPy is imported only where an array is read.
"""

from __future__ import annotations

import base64
import json
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping
from typing import Any, Callable

_TAG = "$"
_BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
_FACTORIES = {each.__name__: each for each in (int, float, str, list, dict, set, tuple)}
_MAPPINGS: dict[str, Callable[[str], dict[Any, Any]]] = {
    "OrderedDict": lambda _: OrderedDict(),
    "Counter": lambda _: Counter(),
    "defaultdict": lambda factory: defaultdict(_FACTORIES[factory]),
}
"""What is made of a tag, and of the name of its factory, before its items are put into it."""


class CodecError(TypeError):
    """A value of a type that can not be kept."""


def dumps(value: Any) -> bytes:
    """Return the value as JSON, in UTF-8; equal values give equal bytes.

    Raises:
        CodecError: some part of it is of a type that can not be kept.
    """
    return json.dumps(_encode(value), separators=(",", ":")).encode()


def join(encoded: Mapping[str, bytes]) -> bytes:
    """Return what `dumps` returns of a dictionary, given what it has returned of its values."""
    assert _TAG not in encoded, "that is another form"
    return b"{%b}" % b",".join(b"%b:%b" % (json.dumps(key).encode(), value) for key, value in encoded.items())


def loads(data: bytes) -> Any:
    """Return the value that `dumps` was given.

    Raises:
        ValueError: the bytes are not what `dumps` returns.
    """
    try:
        return _decode(json.loads(data))
    except (KeyError, TypeError, IndexError, RecursionError) as error:
        raise ValueError(f"no encoded value: {error}") from error


def _encode(value: Any) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [_encode(item) for item in value]
    if kind is tuple:
        return {_TAG: "tuple", "items": [_encode(item) for item in value]}
    if kind is dict:
        if all(type(key) is str for key in value) and _TAG not in value:
            return {key: _encode(item) for key, item in value.items()}
        return {_TAG: "dict", "items": [[_encode(key), _encode(item)] for key, item in value.items()]}
    if kind in (bytes, bytearray):
        return {_TAG: "bytes", "data": base64.b64encode(value).decode()}
    if kind in (set, frozenset):
        return {_TAG: "set", "items": sorted((_encode(item) for item in value), key=json.dumps)}
    if kind is deque:
        return {_TAG: "deque", "items": [_encode(item) for item in value], "maxlen": value.maxlen}
    if kind in (OrderedDict, Counter) or (kind is defaultdict and value.default_factory in _FACTORIES.values()):
        factory = value.default_factory.__name__ if kind is defaultdict else ""
        items = [[_encode(key), _encode(item)] for key, item in value.items()]
        return {_TAG: kind.__name__, "items": items, "factory": factory}
    if kind.__module__.startswith("numpy.random") and type(_bits_of(value)).__name__ in _BIT_GENERATORS:
        return {_TAG: "generator", "state": _encode(value.bit_generator.state)}
    if kind.__module__.split(".")[0] in ("numpy", "ml_dtypes") and hasattr(value, "tobytes"):
        return _encode_array(value)
    raise CodecError(f"a value of type {kind.__module__}.{kind.__qualname__} can not be kept")


def _bits_of(value: Any) -> Any:
    """What a generator of NumPy's draws from; one of somebody else's kind could not be made again."""
    return getattr(value, "bit_generator", None)


def _encode_array(value: Any) -> Any:
    if value.dtype.hasobject or value.dtype.names is not None:
        raise CodecError(f"an array of dtype {value.dtype} can not be kept")
    scalar = type(value).__name__ != "ndarray"
    return {
        _TAG: "scalar" if scalar else "array",
        "dtype": value.dtype.str if value.dtype.kind != "V" else value.dtype.name,
        "shape": list(value.shape),
        "data": base64.b64encode(value.tobytes()).decode(),
    }


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag = value.get(_TAG)
    if tag is None:
        return {key: _decode(item) for key, item in value.items()}
    if tag == "tuple":
        return tuple(_decode(item) for item in value["items"])
    if tag == "dict":
        return {_decode(key): _decode(item) for key, item in value["items"]}
    if tag == "deque":
        return deque((_decode(item) for item in value["items"]), value["maxlen"])
    if tag in _MAPPINGS:
        found = _MAPPINGS[tag](value["factory"])
        for key, item in value["items"]:
            found[_decode(key)] = _decode(item)
        return found
    if tag == "generator":
        return _decode_generator(_decode(value["state"]))
    if tag == "set":
        return {_decode(item) for item in value["items"]}
    if tag == "bytes":
        return base64.b64decode(value["data"], validate=True)
    if tag in ("array", "scalar"):
        array = _decode_array(value)
        return array if tag == "array" else array.reshape(-1)[0]
    raise ValueError(f"unknown tag {tag!r}")


def _decode_generator(state: dict[str, Any]) -> Any:
    import numpy

    name = state["bit_generator"]
    if name not in _BIT_GENERATORS:
        raise ValueError(f"{name!r} is no generator of NumPy's")
    bits = getattr(numpy.random, name)()
    bits.state = state
    return numpy.random.Generator(bits)


def _decode_array(value: Any) -> Any:
    import numpy

    name = value["dtype"]
    try:
        dtype = numpy.dtype(name)
    except TypeError:
        import importlib

        dtype = numpy.dtype(getattr(importlib.import_module("ml_dtypes"), name))
    data = bytearray(base64.b64decode(value["data"], validate=True))
    return numpy.frombuffer(data, dtype=dtype).reshape(value["shape"])
