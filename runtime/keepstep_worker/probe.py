"""When a step's own work was done: the moment its gradients are ready, before the ranks wait for each other.

In a synchronous step everybody is as slow as the slowest, so the length of a step names nobody; the time from its start
to the local gradients does. The optimizer's entry is wrapped, and while a train function is traced an operation is put
behind the gradients that stores the time of day; it is read once in a while. Where XLA compiles the function, or op
determinism is on, TensorFlow refuses that operation: nothing is measured.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

_PLACES = (("BaseOptimizer", "apply"), ("Optimizer", "apply_gradients"), ("OptimizerV2", "apply_gradients"))
"""Classes and methods that are given local gradients: Keras 3, tf_keras, and tf_keras's legacy optimizers."""

_EVERY_NS = 200_000_000
"""How often the stored time is read: it takes up to 0.2 ms after a step that has filled the caches, and the agent shows
means over as long.
"""


class _Stamp:
    """Where the time is stored: a resource of no strategy, on this process's CPU.

    Attributes:
        handle: of a float64 variable with the time of day in seconds; None before the first trace.
        eager_ns: the same where no function was traced, monotonic.
        due_ns: when the variable may be read again, monotonic.
    """

    def __init__(self) -> None:
        self.handle: Any = None
        self.eager_ns = self.due_ns = 0
        self.lock = threading.Lock()


_stamp = _Stamp()


def install(module: Any) -> None:
    """Wrap the optimizers of a module of Keras that has just been executed; a module without them is left alone."""
    for name, method in _PLACES:
        kind = getattr(module, name, None)
        if kind is not None and method in vars(kind):
            setattr(kind, method, _wrapped(vars(kind)[method], pairs=method == "apply_gradients"))


def gradients_ready_ns(start_ns: int) -> int:
    """Return when the gradients of the step begun at `start_ns` were ready, monotonic; 0 where it was not measured."""
    now_ns = time.monotonic_ns()
    if _stamp.handle is None:
        ready_ns = _stamp.eager_ns
    elif now_ns < _stamp.due_ns:
        return 0
    else:
        import tensorflow as tf

        _stamp.due_ns = now_ns + _EVERY_NS
        stored_s = float(tf.raw_ops.ReadVariableOp(resource=_stamp.handle, dtype=tf.float64))
        # the offset of the two clocks is taken anew each time, so that a clock that was set spoils one step at most
        ready_ns = int(stored_s * 1e9) - time.time_ns() + time.monotonic_ns()
    return ready_ns if start_ns < ready_ns <= time.monotonic_ns() else 0


def _wrapped(original: Callable[..., Any], pairs: bool) -> Callable[..., Any]:
    @functools.wraps(original)
    def apply(self: Any, gradients: Any, *args: Any, **keywords: Any) -> Any:
        gradients = list(gradients)
        _mark([gradient for gradient, _ in gradients] if pairs else gradients)
        return original(self, gradients, *args, **keywords)

    return apply


def _mark(gradients: Iterable[Any]) -> None:
    """Store the time behind the gradients: in the graph that is being traced, or now."""
    import tensorflow as tf
    from tensorflow.python.framework import config
    from tensorflow.python.ops import control_flow_util

    if tf.executing_eagerly():
        _stamp.eager_ns = time.monotonic_ns()
        return
    graph = tf.compat.v1.get_default_graph()
    if config.is_op_determinism_enabled() or control_flow_util.GraphOrParentsInXlaContext(graph):
        return
    if not hasattr(graph, "capture"):  # a graph of TensorFlow 1
        return
    tensors = [getattr(gradient, "values", gradient) for gradient in gradients if gradient is not None]
    tensors = [tensor for tensor in tensors if isinstance(tensor, tf.Tensor)]
    if not tensors:
        return
    handle = _handle(tf)
    with tf.device("CPU:0"):
        if tf.config.list_logical_devices("GPU"):
            # A control edge fires when kernels are enqueued; a scalar that is copied to the host, when they are done.
            ends = (tensors[0], tensors[-1])
            tensors += [tf.identity(tf.reshape(tensor, [-1])[:1]) for tensor in ends]
        with tf.control_dependencies(tensors):
            tf.raw_ops.AssignVariableOp(resource=handle, value=tf.timestamp())


def _handle(tf: Any) -> Any:
    """Return the stamp's resource, made on first use outside of any graph and any strategy."""
    with _stamp.lock:
        if _stamp.handle is None:
            with tf.init_scope(), tf.device("CPU:0"):
                handle = tf.raw_ops.VarHandleOp(dtype=tf.float64, shape=[], shared_name="keepstep_gradients_ready")
                tf.raw_ops.AssignVariableOp(resource=handle, value=tf.constant(0.0, tf.float64))
                _stamp.handle = handle
        return _stamp.handle
