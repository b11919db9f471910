"""Variables of strings: their bytes differ in length from step to step, so each is kept as a blob."""

from __future__ import annotations

from typing import Any

from keepstep_worker import codec
from keepstep_worker.slab import SlabError, read_blob


def is_string(component: Any) -> bool:
    """Return whether a tf.Variable holds strings."""
    return bool(component.dtype.name == "string")


def encode(component: Any) -> bytes:
    """Return shape and strings of a variable, as they are now."""
    value = component.read_value().numpy()
    strings = [value] if isinstance(value, bytes) else value.reshape(-1).tolist()
    return codec.dumps((list(getattr(value, "shape", ())), strings))


def fits(component: Any, raw: memoryview) -> bool:
    """Return whether the variable can take what is in a slab."""
    try:
        shape, _ = codec.loads(read_blob(raw))
        return bool(component.shape.is_compatible_with(shape))
    except (SlabError, ValueError, TypeError):
        return False


def decode(payload: bytes) -> Any:
    """Return the encoded strings as a tensor."""
    import tensorflow as tf

    shape, strings = codec.loads(payload)
    return tf.reshape(tf.constant(strings, "string", (len(strings),)), shape)
