"""A fingerprint of what this rank has computed in a step, before it exchanges anything with others.

The all-reduce gives all ranks the same gradients, wrong ones too. So the fingerprint is taken of the local ones, where
`probe` sees them: each tensor's bytes are hashed, and so are all hashes together, so that any bit that is another one,
or in another place, makes another fingerprint. Several updates within a step are added up.

Only steps that the agent names are looked at. The function that is traced has the operations in both branches of a
condition; in all other steps it reads one flag on the host and adds a zero. A job whose policy does not ask for it
(KEEPSTEP_FINGERPRINT) gets none of this into its graph.

A step comes out bit for bit the same again only with TensorFlow's op determinism: without it there is no fingerprint,
and the agent is told so.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from keepstep_worker import identity

NOT_DETERMINISTIC = "tf.config.experimental.enable_op_determinism() is off, so no step comes out the same again"
COMPILED = "XLA compiles the step (jit_compile): its gradients can not be looked at"
UNSEEN = "no optimizer of Keras was given gradients in it"
_SUM, _FLAG = "keepstep_fingerprint", "keepstep_fingerprint_wanted"
_BITS = 2**64


class _State:
    """What is wanted and what was found.

    Attributes:
        wanted: the step that is under way is looked at.
        handles: of an int64 variable with the sum and of a flag, on this process's CPU; None before the first trace.
        found: what was added up where no function was traced; None where nothing was.
        why: why a step that was traced can not be looked at.
        off: something went wrong: nothing is looked at any more.
    """

    def __init__(self) -> None:
        self.wanted = self.off = False
        self.handles: tuple[Any, Any] | None = None
        self.found: int | None = None
        self.why = ""
        self.lock = threading.Lock()


_state = _State()


def see(gradients: Any) -> None:
    """Add the local gradients to this step's fingerprint: in the graph that is being traced, or now."""
    if _state.off or not identity.wants_fingerprints():
        return
    try:
        _see(gradients)
    except Exception as error:  # whatever it is, the script's step is worth more
        _give_up(error)


def is_in_graphs() -> bool:
    """Whether some function was traced with the operations."""
    return _state.handles is not None


def begin() -> None:
    """The step that comes now is looked at."""
    _state.wanted, _state.found = True, None
    _set(0, True)


def end() -> tuple[str, str]:
    """The step is over: return its fingerprint in hexadecimal digits, or why there never is one.

    Both are empty where it was a step without gradients.
    """
    _state.wanted = False
    try:
        value = None if _state.off else _read()
        _set(0, False)
    except Exception as error:
        _give_up(error)
        value = None
    if value is not None:
        return f"{value % _BITS:016x}", ""
    return "", _state.why if _state.why or _state.handles is not None else UNSEEN


def _see(gradients: Any) -> None:
    import tensorflow as tf
    from tensorflow.python.framework import config
    from tensorflow.python.ops import control_flow_util

    if not config.is_op_determinism_enabled():
        _state.why = NOT_DETERMINISTIC
        return
    leaves = tf.nest.flatten(gradients, expand_composites=True)
    tensors = [leaf for leaf in leaves if isinstance(leaf, tf.Tensor)]
    if not tensors:
        return
    if tf.executing_eagerly():
        if _state.wanted:
            _state.found = (_state.found or 0) + int(_fingerprint(tf, tensors))
        return
    graph = tf.compat.v1.get_default_graph()
    if control_flow_util.GraphOrParentsInXlaContext(graph):
        _state.why = COMPILED
        return
    if not tf.compat.v1.executing_eagerly_outside_functions():  # a graph of TensorFlow 1
        return
    _make(tf)
    with tf.device("CPU:0"):
        # the same resources by their names: those that are read, captured, would be a part of what the script exports
        flag = tf.raw_ops.VarHandleOp(dtype=tf.bool, shape=[], shared_name=_FLAG)
        wanted = tf.raw_ops.ReadVariableOp(resource=flag, dtype=tf.bool)
        added = tf.cond(wanted, lambda: _fingerprint(tf, tensors), lambda: tf.constant(0, tf.int64))
        place = tf.raw_ops.VarHandleOp(dtype=tf.int64, shape=[], shared_name=_SUM)
        tf.raw_ops.AssignAddVariableOp(resource=place, value=added)


def _fingerprint(tf: Any, tensors: list[Any]) -> Any:
    """Hash all tensors, in order, to one int64, on the host: a GPU's memory may be full."""
    with tf.device("CPU:0"):
        hashes = [tf.fingerprint(tf.reshape(tensor, [1, -1])) for tensor in tensors]
        whole = tf.fingerprint(tf.reshape(tf.concat(hashes, axis=0), [1, -1]))
        return tf.reshape(tf.bitcast(whole, tf.int64), [])


def _make(tf: Any) -> None:
    """Make the resources on first use, outside of any graph and any strategy."""
    with _state.lock:
        if _state.handles is None:
            with tf.init_scope(), tf.device("CPU:0"):
                place = tf.raw_ops.VarHandleOp(dtype=tf.int64, shape=[], shared_name=_SUM)
                flag = tf.raw_ops.VarHandleOp(dtype=tf.bool, shape=[], shared_name=_FLAG)
                _state.handles = (place, flag)
            _set(0, _state.wanted)


def _set(value: int, wanted: bool) -> None:
    if _state.handles is None:
        return
    import tensorflow as tf

    place, flag = _state.handles
    with tf.init_scope(), tf.device("CPU:0"):
        tf.raw_ops.AssignVariableOp(resource=place, value=tf.constant(value, tf.int64))
        tf.raw_ops.AssignVariableOp(resource=flag, value=tf.constant(wanted))


def _read() -> int | None:
    """Return the sum; None where nothing was looked at."""
    if _state.handles is None:
        return _state.found
    import tensorflow as tf

    stored = int(tf.raw_ops.ReadVariableOp(resource=_state.handles[0], dtype=tf.int64))
    return stored + (_state.found or 0) or None


def _give_up(error: Exception) -> None:
    """Look at nothing any more, and say so once."""
    _state.off, _state.why = True, f"it could not be looked at: {error!r}"[:200]
    print(f"keepstep: gradients are not looked at any more: {error!r}"[:500], file=sys.stderr, flush=True)


class Fingerprints:
    """What a session does about the steps that the agent names.

    Attributes:
        told: the newest step of which the agent was told.
    """

    def __init__(self, send: Callable[[dict[str, Any]], None]) -> None:
        self._send = send
        self.told = self._begun = 0

    def enter(self, wanted: int, completed: int, step: int) -> None:
        """Look at the step that is entered, if it is the one, or behind it where several are executed in one go."""
        if completed < wanted <= step:
            begin()
            self._begun = wanted
        elif wanted <= completed:
            self._tell(wanted, "", "")

    def complete(self, step: int) -> None:
        """Tell what was found, if a step was looked at."""
        if 0 < self._begun <= step:
            value, why = end()
            self._tell(self._begun, value, why)

    def _tell(self, step: int, value: str, why: str) -> None:
        self.told, self._begun = step, 0
        self._send({"kind": "fingerprint", "step": step, "value": value, "why": why})
