"""What keepstep does around a `Model.fit`, of whichever Keras: heartbeats, snapshots, resume at the batch, the drain.

Start reading at `instrument`. A `Fit` is the one under way, told of by the wrapped methods of Keras's own CallbackList,
so that it acts before and after all of the user's callbacks and adds none.

A *step* is a batch, counted over all fits. A *position* says which fit, epoch and batch come after the step. A resumed
fit starts in the position's epoch: Keras's loop runs over the batches that were trained before, but reads them only,
and the callbacks hear nothing; at the last of them the state is put back. What is built lazily is built by then: the
first of those batches is trained where variables are still wanting, and what that did is overwritten.

In a world of another size than the one that saved, a rank's own state is as `Run.track` has it, and the position is
put into this world's batches (`training.convert_position`). Batch and learning rate are the script's: nothing tells
which of them it has derived from the world already, and the learning rate is part of the optimizer's state, so a fit
is scaled by nobody. For the policy's `keep_global`, give `fit` the same global batch in every world (`tf.distribute`
splits it), for `keep_local` one of a size times `strategy.num_replicas_in_sync`; what a callback may then multiply the
full world's learning rate with is `keepstep_worker.join().learning_rate_scale`.
"""

from __future__ import annotations

import functools
import inspect
import sys
import time
from collections.abc import Callable
from typing import Any

from keepstep_worker import codec, fit_state, initial_values, orders
from keepstep_worker import wire as wires
from keepstep_worker.draws import Draws
from keepstep_worker.slab import LOCAL, REPLICATED, Tensor, size_bytes
from keepstep_worker.slab_view import RestoreError, SlabView
from keepstep_worker.training import POSITION, PYTHON, Flavour, Position, Training
from keepstep_worker.variables import assign

_HELD_BYTES_MAX = 16 << 20
"""Local tensors up to this size are kept aside while a validation runs; beyond it lie frozen weights."""

_active: Fit | None = None


def instrument(owner: Any, callback_list: Any, flavour: Flavour) -> None:
    """Wrap `owner.fit` and the methods of CallbackList. Outside keepstep both do what they did."""
    owner.fit = _wrap_fit(owner.fit, flavour)
    for name in (
        "on_train_begin", "on_epoch_begin", "on_train_batch_begin", "on_train_batch_end",
        "on_test_begin", "on_test_batch_begin", "on_test_end",
    ):  # fmt: skip
        setattr(callback_list, name, _wrap_hook(getattr(callback_list, name), name))


def active() -> Fit | None:
    """Return the fit that is under way."""
    return _active


def _wrap_fit(fit: Callable[..., Any], flavour: Flavour) -> Callable[..., Any]:
    signature = inspect.signature(fit)

    @functools.wraps(fit)
    def instrumented(self: Any, *args: Any, **kwargs: Any) -> Any:
        training = Training.current() if _active is None else None
        if training is None:
            return fit(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        return _run(Fit(training, fit, flavour, bound))

    return instrumented


def _run(fit: Fit) -> Any:
    """Do a fit: give back what it gave before the restart, go on with it, or begin it."""
    global _active
    training = fit.training
    training.ordinal += 1
    position = training.position
    if position is not None and fit.ordinal < position.fit + position.finished:
        record = training.fits[fit.ordinal]
        return fit.fail_again(record) if record.get("failed") else fit.give_back(record)
    if position is not None and fit.ordinal == position.fit:
        fit.resume_at(position)
    _active = fit
    training.session.set_provider(fit.tensors)
    try:
        history = fit.train()
    finally:
        _active = None
        training.session.set_provider(None)
    return history


def _wrap_hook(hook: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(hook)
    def observed(self: Any, *args: Any, **kwargs: Any) -> None:
        fit = _active
        if fit is None or not fit.owns(self, name):
            hook(self, *args, **kwargs)
        else:
            getattr(fit, name)(functools.partial(hook, self, *args, **kwargs), *args)

    return observed


class Fit:
    """One call of `fit`. The methods named `on_...` stand around those of Keras's CallbackList.

    Attributes:
        resume: where to go on, None where there is nothing (any more) to put back.
        orders: iterators made of the data when the epoch began, or where past epochs are read again, the first epoch.
        draws: what the data is ordered by where it is a `PyDataset`.
    """

    def __init__(
        self, training: Training, original: Callable[..., Any], flavour: Flavour, bound: inspect.BoundArguments
    ) -> None:
        self.training, self.flavour = training, flavour
        self.ordinal, self.begun = training.ordinal, training.step
        self.resume: Position | None = None
        self.orders: list[int] = []
        self.draws = Draws(bound.arguments.get("x"))
        self._original, self._bound = original, bound
        self._model: Any = next(iter(bound.arguments.values()))
        self._own = training.prefixes_of(self._model, flavour)
        self._first_epoch = int(bound.arguments.get("initial_epoch") or 0)
        self._callbacks: Any = None
        self._states = fit_state.CallbackStates(())
        self._epoch = self._batch = self._begin = self._batches = 0
        self._execution_steps = 1
        self._logs: Any = {}
        self._reading = self._announced = self._finished = self._expects_batches = False
        self._size = self._read_begun_ns = 0
        self._train_function: Any = None
        self._held: dict[str, Tensor] = {}

    # --- from Keras --------------------------------------------------------------------------------------------------

    def owns(self, callbacks: Any, hook: str) -> bool:
        """Tell whether a CallbackList is this fit's: the first that begins a training of its model."""
        if self._callbacks is None and hook == "on_train_begin" and callbacks.model is self._model:
            self._callbacks = callbacks
        return callbacks is self._callbacks

    def on_train_begin(self, call: Callable[[], None], logs: Any = None) -> None:
        call()
        self._states = fit_state.CallbackStates(self._callbacks.callbacks)
        self._execution_steps = self.flavour.execution_steps(self._model)
        params = self._callbacks.params or {}
        self._batches, epochs = int(params.get("steps") or 0), int(params.get("epochs") or 1)
        begun = self.begun - self._batches * self._first_epoch
        if self.resume is not None:
            self.resume = self.training.in_this_world(self.resume, self._batches, self._execution_steps)
            begun = self.resume.step - self.resume.batch - self._batches * self.resume.epoch
        last_step = begun + self._batches * epochs
        self.training.session.join(self.flavour.kind, last_step if self._batches else 0)
        if self.resume is not None and getattr(self._model, "_initial_epoch", None):
            self._model._initial_epoch = self.resume.epoch  # what Keras's own BackupAndRestore found is older

    def on_epoch_begin(self, call: Callable[[], None], epoch: int, logs: Any = None) -> None:
        call()
        self.training.session.turn_to(wires.PHASE_EPOCH)
        self._epoch, self._batch, self._expects_batches = epoch, 0, True
        self._read_begun_ns = time.monotonic_ns()
        if self.resume is not None and self.resume.batch:
            self._train_function, self._model.train_function = self._model.train_function, self._read_again

    def on_train_batch_begin(self, call: Callable[[], None], batch: int, logs: Any = None) -> None:
        self._begin, self._reading = batch, self.resume is not None
        if not self._reading:
            self.training.session.enter_step(self.training.step + self._ahead())
            call()

    def on_train_batch_end(self, call: Callable[[], None], batch: int, logs: Any = None) -> None:
        if self._reading:
            return
        self.training.session.turn_to(wires.PHASE_PAUSED)
        call()
        trained = min(batch + 1, self._batches or batch + 1)
        self.training.step += trained - self._batch
        self._batch, self._logs = trained, logs
        if not self._announced:
            self._announced = True
            self.training.session.announce()
        self.training.session.complete_step(self.training.step)

    def on_test_begin(self, call: Callable[[], None], logs: Any = None) -> None:
        """Keep aside what the validation is about to change, so that a drain during it saves the completed step."""
        tensors = [tensor for tensor in self.tensors() if tensor.key.startswith(LOCAL)]
        small = [tensor for tensor in tensors if size_bytes(tensor.dtype, tensor.shape) <= _HELD_BYTES_MAX]
        self._held = {tensor.key: fit_state.held(tensor) for tensor in small}
        call()

    def on_test_batch_begin(self, call: Callable[[], None], batch: int, logs: Any = None) -> None:
        self.training.session.hold()
        self.training.session.turn_to(wires.PHASE_EVALUATING)
        call()

    def on_test_end(self, call: Callable[[], None], logs: Any = None) -> None:
        self.training.session.turn_to(wires.PHASE_PAUSED)
        call()
        self._held = {}

    def before_batches(
        self, iterate: Callable[[], Any], size: int | None, goes_on: bool, adapter: Any
    ) -> tuple[int, int | None]:
        """Put the state of an epoch's begin back; called by whatever begins to iterate over data.

        Args:
            iterate: returns a new iterator over that data.
            size: batches in an epoch, None where that is not known.
            goes_on: an epoch's data begins where that of the one before has ended.
            adapter: what Keras reads it through.

        Returns:
            How many earlier epochs' data have to be read again, and `size` as it was known before the restart.
        """
        if not self._expects_batches:  # not the training's data
            return 0, size
        self._expects_batches = False
        replay, data, past = 0, self._bound.arguments.get("x"), self._epoch - self._first_epoch
        self.draws.begin(adapter, past, goes_on)
        if self.resume is not None:
            self.draws.again(0 if goes_on else past)
            replay, size = past * goes_on, size or self.resume.size or None
            if self.resume.batch == 0:
                if not self._is_built():
                    self.draws.aside(lambda: self._model.train_function(iterate()))
                self._restore(self.resume)
        orders.catch_up(data, self.orders)
        if not (goes_on and self.orders):
            self.orders = orders.made(data)
        self._size = size or 0
        return replay, size

    # --- going on ----------------------------------------------------------------------------------------------------

    def resume_at(self, position: Position) -> None:
        """Begin at a position of this fit instead of at its start."""
        self.resume, self.begun = position, position.begun
        self.orders = self.training.python.get("orders", [])
        self.draws.load(self.training.python.get("draws"))
        fit_state.have_go_on(self._bound.arguments.get("callbacks"))
        self.flavour.begin_at(self._bound.arguments, position.epoch)

    def give_back(self, record: dict[str, Any]) -> Any:
        """Return the History of this fit, which finished before the restart, without training again."""
        training, arguments, begun_ns = self.training, self._bound.arguments, time.monotonic_ns()
        view, position = training.view, training.position
        assert view is not None and position is not None, "what finished before was saved"
        training.tell_given_back(self.ordinal, position)
        if not any(map(self._is_own, view.places)):
            print(f"keepstep: the model of fit {self.ordinal} was not in use any more: not restored", file=sys.stderr)
        elif not self._is_built():
            self._build()
        named = [(_stored(view, key), variable) for key, variable in training.named() if self._is_own(key)]
        assign(view, [each for each in named if each[0] in view], view.places, initial_values.put_back)
        if self.ordinal == position.fit:
            initial_values.settle()
        history = fit_state.give_back(arguments.get("callbacks"), self._model, self.flavour.history, record)
        orders.catch_up(arguments.get("x"), record.get("orders", []))
        self.draws.load(record.get("draws"))
        self.draws.again()
        fit_state.restore_random_state(record["random"])
        if self.ordinal == position.fit:
            training.restore_random_state()
            training.step, training.view = position.step, None
            training.session.join(self.flavour.kind, position.step)
            training.session.restoration_done(position.step, begun_ns)
            training.session.finish()
        return history

    def fail_again(self, record: dict[str, Any]) -> Any:
        """Train again, unobserved, what ended by an exception before the restart: the script has caught that one."""
        try:
            return self._original(*self._bound.args, **self._bound.kwargs)
        finally:
            fit_state.restore_random_state(record["random"])

    def train(self) -> Any:
        """Let Keras train; keep what a later start of the script is to be given back, and have the last step sealed.

        Raises:
            RestoreError: the data ended before the position to go on from.
        """
        try:
            history = self._original(*self._bound.args, **self._bound.kwargs)
        except Exception:  # which the script may catch, and go on with another fit
            self.training.fits.append({"failed": True, "random": fit_state.random_state()})
            raise
        if self.resume is not None:
            raise RestoreError(f"the data of epoch {self._epoch} ended before batch {self.resume.batch}")
        callbacks, arrays = self._states.save()
        self.training.fits.append({
            "callbacks": callbacks,
            "arrays": arrays,
            "params": fit_state.keepable(getattr(self._callbacks, "params", None) or {}),
            "random": fit_state.random_state(),
            "orders": orders.made(self._bound.arguments.get("x")),
            "draws": self.draws.encoded,
        })  # fmt: skip
        self._finished = True
        self.training.step = self.training.session.leave_step()  # data of unknown size ends in a step that it enters
        self.training.session.finish()
        return history

    def tensors(self) -> list[Tensor]:
        """Return all that is to be saved, of this moment; during a validation, of the moment before it."""
        training = self.training
        callbacks, arrays = self._states.save()
        python = {
            "world_size": training.session.identity.world_size,
            "callbacks": callbacks,
            "logs": fit_state.plain_logs(self._logs),
            "stop": bool(getattr(self._model, "stop_training", False)),
            "orders": self.orders,
            "draws": self.draws.encoded,
        }
        position = Position(
            self.ordinal, self._epoch, self._batch, training.step, self.begun, self._size, self._finished
        )
        tensors = training.tensors((_random(name), each) for name, each in self.flavour.generators().items())
        tensors.append(training.blobs.tensor(POSITION, codec.dumps(tuple(position))))
        tensors.append(training.blobs.tensor(PYTHON, codec.dumps(python)))
        tensors += fit_state.random_tensors(training.blobs)
        tensors.append(training.fits_tensor())
        tensors += [fit_state.array_tensor(key, array) for key, array in arrays.items()]
        return [self._held.get(tensor.key, tensor) for tensor in tensors] if self._held else tensors

    def _ahead(self) -> int:
        """Return how many batches the coming call of the train function takes."""
        return min(self._execution_steps, self._batches - self._begin) if self._batches else self._execution_steps

    def _read_again(self, iterator: Any) -> Any:
        """Stand in for the train function where a batch was trained before the restart."""
        position = self.resume
        assert position is not None, "Keras's own train function is back once the state is"
        try:
            if self._begin == 0 and not self._is_built():
                self._train_function(iterator)
            else:
                orders.advance(iterator, self._ahead())
        except StopIteration as error:
            raise RestoreError(f"the data of epoch {self._epoch} ended before batch {position.batch}") from error
        if self._begin + self._ahead() < position.batch:
            return {}
        self._model.train_function = self._train_function
        self._restore(position)
        return self._logs

    def _restore(self, position: Position) -> None:
        training, view, read_ns = self.training, self.training.view, time.monotonic_ns() - self._read_begun_ns
        assert view is not None, "a position comes with a state"
        named = [(key, each) for key, each in training.named() if self._is_own(key) or key in view]
        made = self.flavour.generators(key.rsplit("/", 1)[1] for key in view.places if key.startswith(_random("")))
        named += [(_random(name), each) for name, each in made.items() if _random(name) in view]
        assign(view, named, [key for key in view.places if not self._is_own(key)], initial_values.put_back)
        initial_values.settle()
        python = training.python
        self._states.restore(python["callbacks"], lambda key: view.array(key).copy())
        self._logs, self._model.stop_training = python["logs"], python["stop"]
        training.step, self._batch = position.step, position.batch
        training.restore_random_state()
        self.resume = training.view = None
        training.session.restoration_done(position.step, self._read_begun_ns, read_ns)
        seconds = read_ns / 1e9
        where = f"fit {position.fit}, epoch {position.epoch}, batch {position.batch}"
        print(f"keepstep: on from step {position.step} ({where}), data read again in {seconds:.3f} s", file=sys.stderr)

    def _build(self) -> None:
        """Train one batch, so that all variables exist; what it did to them is overwritten."""

        class Stop(self.flavour.callback):  # type: ignore[name-defined]
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                self.model.stop_training = True

        replaced = {"callbacks": [Stop()], "verbose": 0, "validation_data": None, "validation_split": 0.0}
        bound = self._bound
        arguments = {**bound.arguments, **replaced, "epochs": self._first_epoch + 1}
        self._original(**arguments)

    def _is_own(self, key: str) -> bool:
        return key.split("/")[1] in self._own

    def _is_built(self) -> bool:
        """Tell whether the model has the variables that were saved of it."""
        view = self.training.view
        return view is None or {key.split("@")[0] for key in filter(self._is_own, view.places)} == {
            key for key, _ in self.training.named() if self._is_own(key)
        }


def _random(name: str) -> str:
    return f"{LOCAL}random/{name}"


def _stored(view: SlabView, key: str) -> str:
    """Return the key under which a variable was saved by a later fit, which may have frozen it or set it free."""
    kind, rest = key.split("/", 1)
    other = f"{LOCAL if key.startswith(REPLICATED) else REPLICATED}{rest}"
    return other if key not in view and other in view else f"{kind}/{rest}"
