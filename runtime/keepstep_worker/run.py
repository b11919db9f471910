"""Three lines for custom loops: a data position, what to save, and steps that go on where they were.

Outside keepstep the same code runs as plain TensorFlow, from the first step to the last.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from typing import Any

from keepstep_worker import codec, fit_state, initial_values, newcomer
from keepstep_worker import variables as state
from keepstep_worker.dataset import Dataset, Shard
from keepstep_worker.identity import KEEP_LOCAL
from keepstep_worker.session import Session
from keepstep_worker.slab import LOCAL, REPLICATED, Blobs, Tensor
from keepstep_worker.slab_view import RestoreError, SlabView
from keepstep_worker.waits import Waits
from keepstep_worker.wire import PHASE_JOINED, StepTimes

_METRIC = re.compile("[A-Za-z_][A-Za-z0-9_]{0,63}")


def join() -> Run:
    """Join the training that the agent runs; outside keepstep, one that nobody watches.

    Raises:
        RuntimeError: it is one whose variables are on parameter servers.
    """
    session = Session.current()
    if session is not None:
        if not session.identity.may_join:
            raise RuntimeError(
                "join() is not for parameter servers: what they hold can not be snapshotted by the chief; "
                "write checkpoints into the watched folder, as tf.train.CheckpointManager does"
            )
        session.join("loop")
    return Run(session)


class Run:
    """One training as a custom loop sees it.

    Attributes:
        rank: this process's rank, from TF_CONFIG outside keepstep.
        world_size: number of ranks of this world.
        full_world_size: number of ranks where no host is missing.
        learning_rate_scale: what a learning rate for the full world is to be multiplied with in this one: the ratio of
            the global batches, which is 1.0 unless the policy says `elastic.batch: keep_local` and hosts are missing.
            (A learning rate that is a variable of a tracked optimizer belongs to the state: it comes back as it was
            saved, whatever the world. Set it anew after `track()`, from the one for the full world.)
        generation: of the world, 0 outside keepstep.
        step: the newest completed step, 0 before the first.
    """

    def __init__(self, session: Session | None) -> None:
        self._session = session
        self.step = self.generation = 0
        if session is not None:
            who = session.identity
            self.rank, self.world_size, self.generation = who.rank, who.world_size, who.generation
            self.full_world_size, self._keeps_local = who.full_world or who.world_size, who.batch == KEEP_LOCAL
            self._weights = who.weights
        else:
            self.rank, self.world_size = _read_cluster(os.environ.get("TF_CONFIG", ""))
            self.full_world_size, self._keeps_local, self._weights = self.world_size, False, ()
        self.learning_rate_scale = self.world_size / self.full_world_size if self._keeps_local else 1.0
        self._tracked, self._collected = False, 0
        self._listed: dict[str, Any] = {}
        self._taken: set[str] = set()
        self._described: state.Described | None = None
        self._stateful: dict[str, Any] = {}
        self._blobs = Blobs()
        self._datasets: list[Dataset] = []
        self._waits = Waits()

    def dataset(
        self,
        source: Any,
        *,
        global_batch: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_remainder: bool = False,
        strategy: Any = None,
    ) -> Dataset:
        """Return an endless iterator over this rank's part of each global batch; see Dataset for the arguments.

        In a world in which hosts are missing the policy's `elastic.batch` says what a step takes: with `keep_global`
        the same `global_batch` samples, in larger parts; with `keep_local` each rank the part that it has in the full
        world, so that the global batch is smaller (see `learning_rate_scale`). Parts differ by a sample where the
        batch can not be divided evenly, and by more with `straggler.respond: rebalance`, where a slow rank gets a
        smaller part: average the loss over the global batch (`scale_loss`), not over the part.
        """
        made = Dataset(
            source,
            global_batch=global_batch,
            seed=seed,
            shuffle=shuffle,
            drop_remainder=drop_remainder,
            shard=Shard(self.rank, self.world_size, strategy, self.full_world_size, self._keeps_local, self._weights),
        )
        made.waits = self._waits
        session = self._session
        if session is not None:
            made.on_read(lambda: session.turn_to(PHASE_JOINED))
        if session is not None and not self._datasets:
            session.tell({"kind": "divides"})
        self._datasets.append(made)
        return made

    @property
    def global_batch(self) -> int:
        """Samples in a step of this world, over all ranks, of the first dataset; see `Dataset.global_batch`.

        Raises:
            RuntimeError: no dataset was made.
        """
        return self._first_dataset().global_batch

    @property
    def local_batch(self) -> int:
        """Samples that this rank takes in a step, of the first dataset; see `Dataset.local_batch`.

        Raises:
            RuntimeError: no dataset was made.
        """
        return self._first_dataset().local_batch

    @property
    def should_stop(self) -> bool:
        """Whether the agent wants training to hold, as the host is about to go: no step is entered beyond the next one.

        `steps()` minds it by itself; to be looked at in what takes long beside the steps, as an evaluation does. Always
        False outside keepstep.
        """
        return self._session is not None and self._session.is_to_hold()

    def log_metric(self, name: str, value: float) -> None:
        """Show a number among the agent's metrics, as `keepstep_script_metric`; nothing happens outside keepstep.

        Args:
            name: letters, digits and underscores; an agent shows up to 64 names, and of each the newest value.
            value: anything that `float` takes, a scalar tensor too.

        Raises:
            ValueError: it is no such name, or no number.
        """
        if not _METRIC.fullmatch(name):
            raise ValueError(f"log_metric: {name!r} is no name of letters, digits and underscores")
        try:
            number = float(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"log_metric: {name} is {value!r}, which is no number") from error
        if self._session is not None:
            self._session.tell({"kind": "metric", "name": name, "value": number}, hint=True)

    def scale_loss(self, per_example_losses: Any) -> Any:
        """Return a replica's share of the mean loss over a step's samples of the first dataset.

        See `Dataset.scale_loss`, which is the same for any of several datasets.

        Raises:
            RuntimeError: no dataset was made, or no batch taken.
        """
        return self._first_dataset().scale_loss(per_example_losses)

    def _first_dataset(self) -> Dataset:
        if not self._datasets:
            raise RuntimeError("there is no dataset: call dataset() before")
        return self._datasets[0]

    def track(self, **things: Any) -> None:
        """Say what belongs to the state, under names of the script's choice; a saved state is restored here.

        Models, layers and modules must be built; an optimizer is built here where it is not. Trainable variables and
        optimizers are replicated; all other variables, data positions and the random states of Python and NumPy are
        local to the rank.

        In a world of another size than the one that saved, replicated state is put back as ever, and a rank that the
        saved world had finds its own local state. A rank that it did not have finds the mean over the saved ranks in
        floating-point variables (statistics of BatchNorm, metrics), rank 0's state in everything else, and data
        positions, which are equal on all ranks. Random generators in which the saved ranks differed get streams of
        the new rank's own, derived from rank 0's state and the rank; those that were in the same state on all saved
        ranks are shared with the new one (see `keepstep_worker.newcomer`). A NumPy generator of another kind than
        MT19937 goes on as rank 0's.

        Args:
            things: models, layers, tf.Modules, metrics, optimizers, variables, tf.random.Generators, datasets, and
                objects with `state()` and `set_state(state)`, whose state is made of numbers, strings, arrays and
                collections.

        Raises:
            RestoreError: the saved state does not fit what the script has built.
            RuntimeError: it was called before; or, from `steps()`, when the state is first saved, things have more
                variables than they had here.
            TypeError: something of a kind that can not be tracked.
            ValueError: a model has no variables yet.
        """
        if self._tracked:
            raise RuntimeError("track() was called before: name everything in one call")
        self._tracked = True
        named: list[state.Named] = []
        generators: list[str] = []
        taken = self._taken
        optimizers = {name: thing for name, thing in things.items() if state.is_optimizer(thing)}
        for name, thing in [*(each for each in things.items() if each[0] not in optimizers), *optimizers.items()]:
            if name in optimizers:
                state.build_optimizer(thing, things.values())
                self._listed[name] = thing
                named += state.name_optimizer(name, thing, taken)
            elif state.is_model(thing):
                self._listed[name] = thing
                named += state.name_model(name, thing, taken)
            elif hasattr(thing, "update_state") and hasattr(thing, "variables"):
                self._listed[name] = thing
                named += state.name_variables(name, (), thing.variables, taken)
            elif hasattr(thing, "make_seeds") and hasattr(thing, "state"):
                generators.append(f"{LOCAL}{name}/state")
                named.append((generators[-1], thing.state))
            elif hasattr(thing, "assign"):
                kind = REPLICATED if getattr(thing, "trainable", False) else LOCAL
                named.append((f"{kind}{name}", thing))
            elif hasattr(thing, "set_state") and hasattr(thing, "state"):
                self._stateful[f"{LOCAL}{name}"] = thing
            else:
                raise TypeError(f"{name} is a {type(thing).__name__}, which can not be tracked")
        if self._session is not None:
            self._described = state.Described(named, self._blobs)
            self._restore(self._session, named, generators)
            self._session.set_provider(self._collect)
            self._session.announce()

    def steps(self, last_step: int) -> Iterator[int]:
        """Yield the steps that are left, up to and including `last_step`; the loop's body executes one."""
        session = self._session
        if session is not None and not self._tracked and session.restored() is not None:
            raise RestoreError("there is a state to restore: call track() before steps()")
        while self.step < last_step:
            step = self.step + 1
            if session is not None:
                session.enter_step(step, last_step)
                if step in session.identity.skipped:
                    self._leave_out(step)
            try:
                yield step
            except GeneratorExit:  # the loop was left
                if session is not None:
                    session.finish(whole=False)
                raise
            self.step = step
            if session is not None:
                session.complete_step(step, self._times(session))
        if session is not None:
            session.finish()

    def _leave_out(self, step: int) -> None:
        """Have the first dataset go past the batch that it would give next."""
        for data in self._datasets[:1]:
            epoch, offset = data.skip()
            print(f"keepstep: step {step}: a batch is left out, up to sample {offset} of epoch {epoch}", flush=True)

    def _times(self, session: Session) -> StepTimes:
        return StepTimes(data_ready_ns=self._waits.over_ns(session.start_ns))

    def _collect(self) -> list[Tensor]:
        self._collected += 1
        if self._collected == 2:  # the first one is announced before any step
            late = state.name_late(self._listed, self._taken)
            if late:
                raise RuntimeError(f"made after track(), so that it would not be saved: {', '.join(late[:8])}")
        assert self._described is not None, "track() has described them"
        blobs = [self._blobs.tensor(key, codec.dumps(thing.state())) for key, thing in self._stateful.items()]
        return [*self._described.tensors(), *blobs, *fit_state.random_tensors(self._blobs)]

    def _restore(self, session: Session, named: list[state.Named], generators: list[str]) -> None:
        view = session.restored()
        if view is None:
            return
        view = newcomer.split_streams(view, self.rank, generators)
        if fit_state.RANDOM not in view:
            raise RestoreError(f"the state of step {view.step} has no {fit_state.RANDOM}")
        others = [*self._stateful, *(key for key in view.places if key.startswith(fit_state.RANDOM))]
        state.assign(view, named, others, initial_values.put_back)
        initial_values.settle()
        for key, thing in self._stateful.items():
            thing.set_state(_load(view, key))
        fit_state.restore_random_from(view, self.rank)
        self.step = view.step
        session.restoration_done(view.step, data_ns=sum(data.again_ns for data in self._datasets))


def _load(view: SlabView, key: str) -> Any:
    if key not in view:
        raise RestoreError(f"the state of step {view.step} has no {key}")
    return codec.loads(view.blob(key))


def _read_cluster(tf_config: str) -> tuple[int, int]:
    """Return rank and world size as TensorFlow's own cluster variable has them; (0, 1) where it says nothing."""
    try:
        config = json.loads(tf_config)
        cluster, task = config["cluster"], config["task"]
        order = [(kind, index) for kind in ("chief", "worker") for index in range(len(cluster.get(kind, ())))]
        return order.index((task["type"], int(task["index"]))), len(order)
    except (ValueError, KeyError, TypeError, AttributeError):
        return 0, 1
