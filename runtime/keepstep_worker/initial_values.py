"""Initial values of a strategy over several hosts, in a worker that goes on from a saved state.

TensorFlow has the first worker send each variable's initial value to all others, one variable after the other: some
milliseconds for each, at every restart, for values that the saved state replaces a moment later. In a worker that is to
put a state back, every rank keeps the value that it has made itself; once the state is there, the ranks tell each other
which variables it had nothing for on any of them, and the first worker's value of those is sent as ever.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from keepstep_worker.session import Session
from keepstep_worker.variables import local_components

_OWNER = "CollectiveAllReduceExtended"
_NEEDED = ("_create_variable", "_get_variable_creator_initial_value")


class _Awaited:
    """A variable whose initial value each rank has made itself so far."""

    def __init__(self, extended: Any, device: str) -> None:
        self.extended, self.device = extended, device
        self.variable: Any = None


class _Values:
    """What is known until a state was put back; a process has one.

    Attributes:
        module: `tensorflow.python.distribute.collective_all_reduce_strategy`.
        send: its own maker of what makes an initial value, by which the first worker sends and the others receive.
        awaited: variables in the order in which all ranks make them.
        put_back: the tf.Variables that the state had a value for.
        settled: the state was put back: from now on a variable's value is sent when it is made.
    """

    def __init__(self) -> None:
        self.module: Any = None
        self.send: Any = None
        self.awaited: list[_Awaited] = []
        self.put_back: list[Any] = []
        self.settled = False

    def are_put_off(self, extended: Any) -> bool:
        """Whether a variable that is made now need not have the first worker's value yet."""
        if self.settled or extended._num_workers < 2 or not self.module.ops.executing_eagerly_outside_functions():
            return False
        session = Session.current()
        return session is not None and session.goes_on()


_values = _Values()


def install(module: Any) -> None:
    """Wrap what makes variables, in the strategy's module that was just executed; nothing where it is another kind."""
    owner: Any = getattr(module, _OWNER, None)
    if not all(hasattr(owner, name) for name in _NEEDED) or not hasattr(module, "collective_ops"):
        return
    _values.module, _values.send = module, owner._get_variable_creator_initial_value
    owner._get_variable_creator_initial_value = _wrapped_value(owner._get_variable_creator_initial_value)
    owner._create_variable = _wrapped_creation(owner._create_variable)


def put_back(components: Iterable[Any]) -> None:
    """Tell that these tf.Variables have a value of the saved state."""
    _values.put_back += components


def settle() -> None:
    """Give what the state had no value for the first worker's, on all ranks; all have to call this, as all restore."""
    awaited = [each for each in _values.awaited if each.variable is not None]
    held = {id(component) for component in _values.put_back}
    _values.settled = True
    for extended in list(dict.fromkeys(each.extended for each in awaited)):
        own = [each for each in awaited if each.extended is extended]
        wants = [any(id(one) not in held for one in local_components(each.variable)) for each in own]
        for each, wanted in zip(own, _on_any_rank(extended, own[0].device, wants)):
            if wanted:
                _send(each, held)
    _values.awaited, _values.put_back = [], []


def _wrapped_value(original: Any) -> Any:
    @functools.wraps(original)
    def value_maker(self: Any, replica_id: int, device: str, primary_var: Any, **keywords: Any) -> Any:
        if replica_id or not _values.are_put_off(self):
            return original(self, replica_id=replica_id, device=device, primary_var=primary_var, **keywords)
        _values.awaited.append(_Awaited(self, device))
        return functools.partial(_own_value, device, keywords["initial_value"], keywords.get("dtype"))

    return value_maker


def _wrapped_creation(original: Any) -> Any:
    @functools.wraps(original)
    def create_variable(self: Any, next_creator: Any, **keywords: Any) -> Any:
        begin = len(_values.awaited)
        variable = original(self, next_creator, **keywords)
        for each in _values.awaited[begin:]:
            each.variable = variable if each.variable is None else each.variable
        return variable

    return create_variable


def _own_value(device: str, value: Any, dtype: Any) -> Any:
    """What this rank makes of a variable's initial value."""
    import tensorflow as tf

    with tf.device(device):
        value = value() if callable(value) else value
        return tf.convert_to_tensor(getattr(value, "wrapped_value", value), dtype=dtype)


def _on_any_rank(extended: Any, device: str, wanted: list[bool]) -> list[bool]:
    """Agree: what one rank wants all will take part in."""
    import tensorflow as tf

    keys = extended._collective_keys
    group = keys.get_group_key([device])
    with tf.device(device):
        counted = _values.module.collective_ops.all_reduce(
            tf.constant(wanted, tf.float32), extended._num_workers, group, keys.get_instance_key(group, device)
        )
    return [count > 0 for count in counted.numpy().tolist()]


def _send(awaited: _Awaited, held: set[int]) -> None:
    """Send the first worker's value; a rank whose own state had one keeps that."""
    components = local_components(awaited.variable)
    make = _values.send(
        awaited.extended,
        replica_id=0,
        device=awaited.device,
        primary_var=None,
        initial_value=components[0].read_value(),
        dtype=components[0].dtype,
    )
    value = make()
    for component in components:
        if id(component) not in held:
            component.assign(value)
