"""Initial values of a strategy over several hosts, in a worker that goes on from a saved state.

TensorFlow has the first worker send each variable's initial value to all others, one variable after the other: some
milliseconds for each, at every restart, for values that the saved state replaces a moment later. In a worker that is to
put a state back, every rank keeps the value that it has made itself; once the state is there, the ranks tell each other
which variables it had nothing for, and the first worker's initial values of those are sent as ever. A rank that has
given such a variable another value by then keeps that, as it would have kept it without keepstep.

Until then the ranks of a restarted world may hold different values where TensorFlow's generators are not seeded.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Sequence
from typing import Any

from keepstep_worker.session import Session
from keepstep_worker.variables import local_components

_OWNER = "CollectiveAllReduceExtended"
_NEEDED = ("_create_variable", "_get_variable_creator_initial_value")
_STARTED_BY_MPI = "OMPI_COMM_WORLD_RANK"
"""Ranks of one host: all but the first know only later whether there is a state."""
_KEPT_BYTES_MAX = 1 << 20
"""Of a larger value on another device than the CPU nothing is kept, as memory may be scarce there."""


class _Awaited:
    """A variable whose initial value each rank has made itself so far.

    Attributes:
        extended: the strategy's, which knows the peers.
        device: of the rank's first replica.
        own: the value that this rank has made; None where it is not kept.
        find: returns the variable, None where it is gone or was never made.
    """

    def __init__(self, extended: Any, device: str, own: Any) -> None:
        self.extended, self.device, self.own = extended, device, own
        self.find: Any = _nothing

    def belongs_to(self, variable: Any) -> None:
        """Tell which variable it was made for."""
        self.find = weakref.ref(variable, self._forget)

    def components(self) -> list[Any]:
        variable = self.find()
        return [] if variable is None else local_components(variable)

    def _forget(self, _: Any) -> None:
        self.own = None


class _Values:
    """What is known until a state was put back; a process has one.

    Attributes:
        module: `tensorflow.python.distribute.collective_all_reduce_strategy`.
        send: its own maker of what makes an initial value, by which the first worker sends and the others receive.
        awaited: variables in the order in which all ranks make them.
        put_back: the tf.Variables that the state has a value for.
        settled: the state was put back: from now on a variable's value is sent when it is made.
    """

    def __init__(self) -> None:
        self.module: Any = None
        self.send: Any = None
        self.awaited: list[_Awaited] = []
        self.put_back: dict[int, Any] = {}
        self.settled = False

    def are_put_off(self, extended: Any, keywords: dict[str, Any]) -> bool:
        """Whether a variable that is made now need not have the first worker's value yet."""
        if self.settled or extended._num_workers < 2 or keywords.get("shape") is not None:
            return False  # one whose shape may change may soon have another one on each rank
        if _STARTED_BY_MPI in os.environ or not self.module.ops.executing_eagerly_outside_functions():
            return False
        session = Session.current()
        return session is not None and session.goes_on()


def _nothing() -> None:
    """Stand in for a variable that is not there."""


_values = _Values()


def install(module: Any) -> None:
    """Wrap what makes variables, in the strategy's module that was just executed; nothing where it is another kind."""
    owner: Any = getattr(module, _OWNER, None)
    if not all(hasattr(owner, name) for name in _NEEDED) or not hasattr(module, "collective_ops"):
        return
    _values.module, _values.send = module, owner._get_variable_creator_initial_value
    owner._get_variable_creator_initial_value = _wrapped_value(owner._get_variable_creator_initial_value)
    owner._create_variable = _wrapped_creation(owner._create_variable)


def put_back(components: Sequence[Any]) -> None:
    """Tell that these tf.Variables are about to get a value of the saved state: what they had is let go of."""
    _values.put_back.update((id(component), component) for component in components)
    for each in _values.awaited:
        if each.own is not None and all(id(one) in _values.put_back for one in each.components()):
            each.own = None


def settle() -> None:
    """Give what the state had no value for the first worker's, on all ranks; all have to call this, as all restore."""
    awaited, held = _values.awaited, _values.put_back
    _values.awaited, _values.put_back, _values.settled = [], {}, True
    if not awaited:
        return
    newest = awaited[-1].extended  # what an earlier strategy calls its messages, a later one may have called others
    wants = [any(id(one) not in held for one in each.components()) for each in awaited]
    alive = [_is_alive(each) if wanted else each.find() is not None for each, wanted in zip(awaited, wants)]
    counted = _sum_over_ranks(newest, awaited[-1].device, [*wants, *alive])
    wanting, living = counted[: len(awaited)], counted[len(awaited) :]
    for each, ranks_wanting, ranks_alive in zip(awaited, wanting, living):
        if ranks_wanting and ranks_alive == newest._num_workers:
            _send(newest, each, held)


def _is_alive(awaited: _Awaited) -> bool:
    components = awaited.components()
    return bool(components) and all(bool(component.is_initialized()) for component in components)


def _wrapped_value(original: Any) -> Any:
    @functools.wraps(original)
    def value_maker(self: Any, replica_id: int, device: str, primary_var: Any, **keywords: Any) -> Any:
        if replica_id or not _values.are_put_off(self, keywords):
            return original(self, replica_id=replica_id, device=device, primary_var=primary_var, **keywords)
        return functools.partial(_own_value, self, device, keywords["initial_value"], keywords.get("dtype"))

    return value_maker


def _wrapped_creation(original: Any) -> Any:
    @functools.wraps(original)
    def create_variable(self: Any, next_creator: Any, **keywords: Any) -> Any:
        begin = len(_values.awaited)
        variable = original(self, next_creator, **keywords)
        for each in _values.awaited[begin:]:
            if each.find is _nothing:
                each.belongs_to(variable)
        return variable

    return create_variable


def _own_value(extended: Any, device: str, value: Any, dtype: Any) -> Any:
    """Make a variable's initial value as this rank would have it; called for one that TensorFlow would send."""
    import tensorflow as tf

    with tf.device(device):
        value = value() if callable(value) else value
        value = tf.convert_to_tensor(getattr(value, "wrapped_value", value), dtype=dtype)
    kept = None
    if hasattr(value, "numpy"):  # not one that is symbolic, in a function that is being traced
        size_bytes = value.dtype.size * int(value.shape.num_elements() or 0)
        kept = value if size_bytes <= _KEPT_BYTES_MAX or "CPU" in value.device else None
    _values.awaited.append(_Awaited(extended, device, kept))
    return value


def _sum_over_ranks(extended: Any, device: str, flags: Sequence[bool]) -> list[int]:
    import tensorflow as tf

    keys = extended._collective_keys
    group = keys.get_group_key([device])
    with tf.device(device):
        counted = _values.module.collective_ops.all_reduce(
            tf.constant(flags, tf.float32), extended._num_workers, group, keys.get_instance_key(group, device)
        )
    return [round(count) for count in counted.numpy().tolist()]


def _send(extended: Any, awaited: _Awaited, held: dict[int, Any]) -> None:
    """Send the first worker's value; what a rank's state had a value for, or the rank another one, keeps that."""
    components, own = awaited.components(), awaited.own
    value = _values.send(
        extended,
        replica_id=0,
        device=awaited.device,
        primary_var=None,
        initial_value=components[0].read_value() if own is None else own,
        dtype=components[0].dtype,
    )()
    for component in components:
        if id(component) not in held and (own is None or _are_equal(component, own)):
            component.assign(value)


def _are_equal(component: Any, own: Any) -> bool:
    now, before = component.read_value().numpy(), own.numpy()
    return bool(now.shape == before.shape and now.tobytes() == before.tobytes())
