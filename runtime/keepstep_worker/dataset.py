"""Data whose position is a number: every sample of an epoch once, at any world size, from any interruption.

The order of an epoch is a pure function of seed and epoch. A global batch is a range of that order, and a rank's part
of it a range of that range; so what is left of an epoch does not depend on who has taken the samples before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from keepstep_worker.sources import Loading, Part, Position, Stream, map_structure, next_batch, open_source
from keepstep_worker.waits import Waits


def part_of(batch: Part, index: int, count: int) -> Part:
    """Return one of `count` parts of a batch; sizes differ by one at most, and a part may be empty."""
    size = batch.end - batch.begin
    return Part(batch.begin + size * index // count, batch.begin + size * (index + 1) // count)


def weighted_part(batch: Part, rank: int, weights: Sequence[int]) -> Part:
    """Return a rank's part of a batch that is divided by weights, to a sample; a part may be empty."""
    size, total, before = batch.end - batch.begin, sum(weights), sum(weights[:rank])
    return Part(batch.begin + size * before // total, batch.begin + size * (before + weights[rank]) // total)


class Shard(NamedTuple):
    """Whose parts of the global batches are wanted.

    Attributes:
        strategy: what distributes a batch where a rank has several local replicas.
        full_world: ranks where none is missing; 0 stands for `world_size`.
        keep_local: whether a rank's part stays what it is in the full world, so that a smaller world's batch is
            smaller; else the global batch stays, and the parts grow.
        weights: how large a rank's part is beside the others'; empty where all are equal.
    """

    rank: int = 0
    world_size: int = 1
    strategy: Any = None
    full_world: int = 0
    keep_local: bool = False
    weights: tuple[int, ...] = ()

    def of(self, batch: Part, replica: int = 0, replicas: int = 1) -> Part:
        """Return the part of a batch that one of this rank's local replicas takes."""
        if len(self.weights) == self.world_size and min(self.weights) > 0:
            return part_of(weighted_part(batch, self.rank, self.weights), replica, replicas)
        return part_of(batch, self.rank * replicas + replica, self.world_size * replicas)

    def batch_of(self, global_batch: int) -> int:
        """Return how many samples this world takes in a step, of the `global_batch` that the full world takes.

        With `keep_local` that is what the full world's first ranks take together, which is exact where the batch can
        be divided evenly, and to a sample a rank where it can not; one sample at the least.
        """
        full = max(self.full_world or self.world_size, 1)
        if not self.keep_local or full == self.world_size:
            return global_batch
        return max(1, global_batch * self.world_size // full)


class Dataset:
    """An endless iterator over this rank's parts of global batches of samples.

    Any sequence of worlds takes every sample of an epoch once: each begins where the state that it goes on from ends.

    `next()` gives a sample's structure (an array, a tuple or a dictionary of arrays) with the rank's samples; where
    there are several local replicas, a per-replica value of the strategy that was given.

    Attributes:
        position: what was taken.
        batch_samples: samples of the newest global batch, over all ranks; 0 before the first.
        waits: when batches were asked for, and when they were there.
        again_ns: nanoseconds that going on cost, of samples read only to come to where the training was.
    """

    def __init__(
        self,
        source: Any,
        *,
        global_batch: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_remainder: bool = False,
        shard: Shard = Shard(),  # noqa: B008 - immutable
    ) -> None:
        """Check the source; NumPy arrays are not copied.

        Args:
            source: arrays that have one sample for each index of their first dimension; what is `Loaded` sample by
                sample; or a function that returns an iterable of an epoch's samples, as a generator function does, or
                a `tf.data.Dataset` of single samples. Such a function may take NumPy's generator of the epoch, to
                draw an order by, and gives the same samples for the same generator; a `tf.data.Dataset` gives the
                same each time, so that it must not shuffle anew for each iteration. Each rank reads all of them and
                keeps its own; to go on in an epoch, it reads up to there.
            global_batch: samples in a step, over all ranks of the full world.
            seed: of the order of every epoch.
            shuffle: False keeps the source's order; a function's own order is always kept.
            drop_remainder: leave out an epoch's last batch where it is smaller than the others.
            shard: this rank among its peers.

        Raises:
            ValueError: arrays differ in length or are empty, or the batch is not between 1 and their length.
        """
        self._source, self._shard = open_source(source, seed, shuffle), shard
        if global_batch < 1 or (drop_remainder and 0 < self.size < global_batch):
            raise ValueError(f"global_batch is {global_batch}, with {self.size} samples")
        self._step_samples, self._seed = shard.batch_of(global_batch), seed
        self._drop_remainder = drop_remainder
        self._local = 1 if shard.strategy is None else shard.strategy.num_replicas_in_sync // shard.world_size
        self._divisor: Any = None
        self.position = Position()
        self.batch_samples = self.again_ns = 0
        self.waits = Waits()

    def on_read(self, call: Callable[[], None]) -> None:
        """Have somebody called once a second while samples are read only to come to where the training was."""
        if isinstance(self._source, Stream):
            self._source.on_read = call

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """Return this rank's part of the next global batch."""
        begun_ns = time.monotonic_ns()
        position, batch = self._source.advance(self.position, self._step_samples, self._drop_remainder)
        strategy = self._shard.strategy

        def take(local_replica: int) -> Any:
            return self._source.take(position.epoch, self._shard.of(batch, local_replica, self._local))

        if self._local > 1:
            value = strategy.experimental_distribute_values_from_function(
                lambda context: _tensors(take(context.replica_id_in_sync_group % self._local))
            )
        else:
            value = _tensors(take(0))
        self.position, self.batch_samples = position, batch.end - batch.begin
        if self._divisor is None:
            self._divisor = _unshared_variable(self.batch_samples)
        self._divisor.assign(self.batch_samples)
        if isinstance(self._source, Loading):
            following, batch = next_batch(position, self.size, self._step_samples, self._drop_remainder)
            self._source.expect(following.epoch, [self._shard.of(batch, r, self._local) for r in range(self._local)])
        self.waits.add(begun_ns, time.monotonic_ns())
        return value

    def skip(self) -> Position:
        """Leave the next global batch out, on all ranks, and return the position after it."""
        self.position, _ = self._source.advance(self.position, self._step_samples, self._drop_remainder)
        return self.position

    @property
    def size(self) -> int:
        """Samples in an epoch; 0 of a function's as long as none of its epochs has ended."""
        return self._source.size

    @property
    def epoch(self) -> int:
        """The epoch that the newest batch came from, counted from 0."""
        return self.position.epoch

    @property
    def global_batch(self) -> int:
        """Samples in a step of this world, over all its ranks; an epoch's last batch may be smaller."""
        return self._step_samples

    @property
    def local_batch(self) -> int:
        """Samples in a step of this world that this rank takes, over all its replicas."""
        begin, end = self._shard.of(Part(0, self._step_samples))
        return end - begin

    def scale_loss(self, per_example_losses: Any) -> Any:
        """Return a replica's share of the mean loss over the global batch that was taken last.

        The shares of all replicas add up to the mean over all samples of the batch, however they are spread: so do
        the gradients, which Keras's optimizers and the strategies' reductions add up over replicas. An average over a
        replica's own samples would weigh the samples of a smaller part more. `tf.nn.compute_average_loss` with
        `global_batch_size=data.global_batch` does the same where no batch is smaller (`drop_remainder=True`).

        Works in and outside of `tf.function`: a trace holds no number of samples, but looks it up at each step.

        Args:
            per_example_losses: a loss for each sample of the replica's part, made with `reduction=None`; may be empty.

        Raises:
            RuntimeError: no batch was taken yet.
        """
        import tensorflow as tf

        if self._divisor is None:
            raise RuntimeError("no batch was taken yet: whose losses are these?")
        losses = tf.convert_to_tensor(per_example_losses)
        return tf.reduce_sum(losses) / tf.cast(self._divisor, losses.dtype)

    @property
    def steps_per_epoch(self) -> int:
        """Steps that a whole epoch takes in this world.

        Raises:
            ValueError: that is not known yet, of a function's samples.
        """
        if not self.size:
            raise ValueError("the source is a function: how many samples an epoch has is known once one has ended")
        whole, rest = divmod(self.size, self._step_samples)
        return whole + (1 if rest and not self._drop_remainder else 0)

    def state(self) -> dict[str, Any]:
        """Return what a later run must know to go on here."""
        return {"epoch": self.position.epoch, "offset": self.position.offset, "seed": self._seed, "size": self.size}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on where `state()` was taken, with any batch size, batch rule and on any number of ranks.

        Raises:
            ValueError: it was taken from another source, or with another seed.
        """
        same_size = state["size"] == self.size or (isinstance(self._source, Stream) and 0 in (state["size"], self.size))
        if not same_size or state["seed"] != self._seed:
            raise ValueError(
                f"the saved position is one of {state['size']} samples and seed {state['seed']}; "
                f"now there are {self.size} and {self._seed}"
            )
        self.position = Position(int(state["epoch"]), int(state["offset"]))
        if isinstance(self._source, Stream):
            self._source.size = self._source.size or int(state["size"])
            begun_ns = time.monotonic_ns()
            self._source.go_to(self.position)
            self.again_ns += time.monotonic_ns() - begun_ns


def _tensors(value: Any) -> Any:
    import tensorflow as tf

    return map_structure(tf.convert_to_tensor, value)


def _unshared_variable(value: int) -> Any:
    """Return a variable that no strategy distributes: traced functions read it, and no peer takes part in it."""
    from tensorflow.python.ops.resource_variable_ops import ResourceVariable

    return ResourceVariable(value, trainable=False, dtype="int64", name="keepstep_batch_samples")
