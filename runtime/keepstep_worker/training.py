"""A process's sequence of fits: what they leave behind for a later start of the script, and what to go on from."""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from keepstep_worker import codec, fit_state, newcomer, probe
from keepstep_worker.session import Session
from keepstep_worker.slab import LOCAL, REPLICATED, Blobs, Tensor
from keepstep_worker.slab_view import RestoreError, SlabView
from keepstep_worker.variables import Described, Named, name_variables

POSITION = REPLICATED + "keepstep/position"
PYTHON = LOCAL + "keepstep/python"
FITS = LOCAL + "keepstep/fits"

_COLLECTION_MAX = 1000
"""What has more items, as data that a model holds, is not gone through at each snapshot."""

_training: Training | None = None


class Position(NamedTuple):
    """Where the training goes on.

    Attributes:
        fit: ordinal of the fit, from 0.
        epoch: the epoch, as Keras counts it.
        batch: batches of that epoch that were trained.
        step: batches trained so far, over all fits.
        begun: the step before the fit's first.
        size: batches in an epoch as far as Keras has found out, 0 where it has not.
        finished: the fit has returned.
    """

    fit: int
    epoch: int
    batch: int
    step: int
    begun: int
    size: int
    finished: bool


def convert_position(position: Position, worlds: tuple[int, int], size: int, execution_steps: int) -> Position:
    """Return where a world of another size than the one that saved goes on in an epoch.

    Nothing changes where an epoch has as many batches as before: then the script's global batch does not depend on the
    world, and each batch is the same samples. Where a batch grows and shrinks with the world, the same part of the
    epoch counts as trained, down to the end of a batch: none of the epoch's samples is left out, and those of less
    than a batch (of one execution, where a call of the train function takes several) may be trained a second time.
    `run.dataset` is exact instead.

    Args:
        position: as it was saved.
        worlds: number of ranks that saved it (0 where that is not known), and of this world.
        size: batches in an epoch now, 0 where that is not known.
        execution_steps: batches that one call of the train function takes.

    Raises:
        RestoreError: it lies in the middle of an epoch, of which it is not known how many batches it has.
    """
    saved_by, world_size = worlds
    if saved_by in (0, world_size) or position.finished:
        return position
    if position.batch and not (position.size and size):
        raise RestoreError(
            f"step {position.step}, batch {position.batch} of epoch {position.epoch}, was saved by {saved_by} ranks;"
            f" for {world_size} it can not be told where that is in data of unknown size: give fit steps_per_epoch,"
            " or data that knows its size (tf.data.experimental.assert_cardinality)"
        )
    if position.batch == 0 or size == position.size:
        return position._replace(size=size)  # the saved size may be that of smaller or larger batches
    batch = position.batch * size // position.size
    return position._replace(batch=batch - batch % execution_steps, size=size)


class Flavour(Protocol):
    """What differs between Keras 3 and tf_keras.

    Attributes:
        kind: its name on the wire.
        callback: the class of callbacks.
        history: the class of the callback that records.
    """

    kind: str
    callback: type
    history: type

    def replicated(self, model: Any) -> Iterable[Any]:
        """Return the trainable variables."""

    def local(self, model: Any) -> Iterable[Any]:
        """Return all other variables of the model; trainable ones may be among them."""

    def optimizer(self, model: Any) -> Iterable[Any]:
        """Return the variables of the model's optimizers, learning rates included where they are such."""

    def begin_at(self, arguments: dict[str, Any], epoch: int) -> None:
        """Have a fit with these arguments begin in a later epoch."""

    def execution_steps(self, model: Any) -> int:
        """Return how many batches one call of the train function takes."""

    def generators(self, wanted: Iterable[str] = ()) -> dict[str, Any]:
        """Return the variables of the global random generators by name: those that exist, and those wanted."""


class Training:
    """All instrumented fits of this process, and the state that it goes on from.

    Attributes:
        step: batches trained so far.
        fits: what is kept of each finished fit.
        models: the models that were fitted, in the order of their first fit, with their flavours.
        view: the state to go on from, None on a fresh start and once it was put back.
        python: what the fit under way had saved with the state beside tensors.
        saved_by: number of ranks of the world that saved it; 0 where that is not known.
    """

    def __init__(self, session: Session) -> None:
        """Take over what the agent wants restored.

        Raises:
            RestoreError: it was not saved by a fit.
        """
        self.session = session
        probe.expect_turns(session.identity.world_size)
        self.step = self.ordinal = 0
        self.fits: list[dict[str, Any]] = []
        self.models: list[tuple[weakref.ref[Any], Flavour]] = []
        self.blobs = Blobs()
        self.view: SlabView | None = session.restored()
        self.position: Position | None = None
        self.python: dict[str, Any] = {}
        self.saved_by = 0
        self._fits_payload: tuple[int, bytes] = (-1, b"")
        self._listed: list[_Listed] = []
        self._named: list[Named] = []
        self._described: Described | None = None
        if self.view is not None:
            if POSITION not in self.view:
                raise RestoreError(f"the state of step {self.view.step} was saved by a loop of the script, not by fit")
            self.view = newcomer.split_streams(self.view, session.identity.rank)
            self.python = codec.loads(self.view.blob(PYTHON))
            self.saved_by = int(self.python.get("world_size", 0))
            self.position = Position(*codec.loads(self.view.blob(POSITION)))
            self.fits = codec.loads(self.view.blob(FITS))

    def restore_random_state(self) -> None:
        """Set the process's own generators to what the state to go on from holds."""
        assert self.view is not None, "it is put back only now"
        if fit_state.RANDOM in self.view:
            fit_state.restore_random_from(self.view, self.session.identity.rank)
        else:  # as it was saved at first
            fit_state.restore_random_state(self.python["random"])

    def in_this_world(self, position: Position, size: int, execution_steps: int) -> Position:
        """Return the saved position in this world's batches; see `convert_position`."""
        worlds = self.saved_by, self.session.identity.world_size
        return convert_position(position, worlds, size, execution_steps)

    @classmethod
    def current(cls) -> Training | None:
        """Return this process's training; None outside keepstep and where instrumentation is off."""
        global _training
        session = Session.current()
        if session is None or session.identity.instrument == "off":
            return None
        if _training is None or _training.session is not session:
            _training = cls(session)
        return _training

    def prefixes_of(self, model: Any, flavour: Flavour) -> tuple[str, str]:
        """Return what the keys of a model's and of its optimizer's variables begin with; a new model is added."""
        for index, (reference, _) in enumerate(self.models):
            if reference() is model:
                return _prefixes(index)
        self.models.append((weakref.ref(model), flavour))
        return _prefixes(len(self.models) - 1)

    def named(self) -> list[Named]:
        """Name the variables of all models that are still in use; the very same list while they are the same."""
        listed = [
            _Listed(ordinal, *map(list, (flavour.replicated(model), flavour.local(model), flavour.optimizer(model))))
            for ordinal, (reference, flavour) in enumerate(self.models)
            if (model := reference()) is not None
        ]
        if not _are_same(listed, self._listed):
            self._listed, self._named, taken = listed, [], set[str]()
            for ordinal, replicated, local, optimizer in listed:
                in_model, in_optimizer = _prefixes(ordinal)
                self._named += name_variables(in_model, replicated, local, taken)
                self._named += name_variables(in_optimizer, optimizer, (), taken)
        return self._named

    def tell_given_back(self, ordinal: int, position: Position) -> None:
        """Say of a fit that others have followed what its model is like where the script goes on behind it."""
        if ordinal < position.fit:
            text = f"fit {ordinal} is not trained again; its model has the weights of step {position.step}, not its own"
            print(f"keepstep: {text}", file=sys.stderr)

    def tensors(self, others: Iterable[Named]) -> list[Tensor]:
        """Return the tensors of what `named` returns and of others; they are described again where these are new."""
        named = [*self.named(), *others]
        if self._described is None or not self._described.is_of(named):
            self._described = Described(named, self.blobs)
        return self._described.tensors()

    def fits_tensor(self) -> Tensor:
        """Return what is kept of the finished fits; encoded anew only when one was added."""
        if self._fits_payload[0] != len(self.fits):
            self._fits_payload = len(self.fits), codec.dumps(self.fits)
        return self.blobs.tensor(FITS, self._fits_payload[1])


class _Listed(NamedTuple):
    """A model's variables, as a flavour lists them."""

    ordinal: int
    replicated: list[Any]
    local: list[Any]
    optimizer: list[Any]


def _are_same(some: Sequence[_Listed], others: Sequence[_Listed]) -> bool:
    """Whether they have the very same variables; two that are not, TensorFlow would compare by their values."""
    return len(some) == len(others) and all(
        one.ordinal == other.ordinal
        and all(len(a) == len(b) and all(map(operator.is_, a, b)) for a, b in zip(one[1:], other[1:]))
        for one, other in zip(some, others)
    )


def _prefixes(index: int) -> tuple[str, str]:
    suffix = str(index + 1) if index else ""
    return f"model{suffix}", f"optimizer{suffix}"


def optimizers_of(model: Any) -> list[Any]:
    """Return the optimizer that a model was compiled with, those among its attributes, and those of models within it.

    These only where the model's training step is the script's: Keras's own uses none of them, and a part that was
    loaded from a file may have one that is twice as large as the part.
    """
    within = [getattr(layer, "optimizer", None) for layer in _layers_of(model) if _trains_by_itself(model)]
    found = [getattr(model, "optimizer", None), *_attributes_of(model), *within]
    found = [each for each in found if _has(each, "apply_gradients", "variables")]
    return list({id(each): each for each in found}.values())


def unlisted(model: Any) -> list[Any]:
    """Return variables that Keras lists nowhere: states of stateful layers, and of generators among the attributes."""
    found: list[Any] = []
    for layer in _layers_of(model):
        if getattr(layer, "stateful", False):
            found += _leaves(getattr(layer, "states", None))
    for each in _attributes_of(model):
        if _has(each, "make_seeds", "state"):
            found.append(each.state)
    return [each for each in found if hasattr(each, "assign")]


def variables_among(model: Any) -> list[Any]:
    """Return what are TensorFlow's own variables among a model's attributes: Keras 3 follows none but its own."""
    return [each for each in _attributes_of(model) if hasattr(type(each), "scatter_nd_update")]


def _trains_by_itself(model: Any) -> bool:
    step = getattr(type(model), "train_step", None)
    return step is not None and step.__module__.split(".")[0] not in ("keras", "tf_keras")


def _has(thing: Any, *names: str) -> bool:
    """Whether a thing has these attributes itself: to ask a distributed variable may take its value, and all hosts."""
    own = getattr(thing, "__dict__", ())
    return all(hasattr(type(thing), name) or name in own for name in names)


def _layers_of(model: Any) -> Iterable[Any]:
    flatten = getattr(model, "_flatten_layers", None)
    return () if flatten is None else flatten()


def _attributes_of(model: Any) -> list[Any]:
    """A model's attributes, and what is in those that are small collections."""
    found: list[Any] = []
    for value in vars(model).values():
        if isinstance(value, Mapping) and len(value) <= _COLLECTION_MAX:
            found += value.values()
        elif isinstance(value, (list, tuple)) and len(value) <= _COLLECTION_MAX:
            found += value
        else:
            found.append(value)
    return found


def _leaves(nested: Any) -> list[Any]:
    if isinstance(nested, (list, tuple)):
        return [leaf for each in nested for leaf in _leaves(each)]
    return [] if nested is None else [nested]
