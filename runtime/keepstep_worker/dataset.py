"""In-memory data whose position is a number: every sample of an epoch once, at any world size, from any interruption.

The order of an epoch is a pure function of seed and epoch. A global batch is a range of that order, and a rank's part
of it a range of that range; so what is left of an epoch does not depend on who has taken the samples before.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple


class Position(NamedTuple):
    """What has been taken: `offset` samples of epoch `epoch`."""

    epoch: int = 0
    offset: int = 0


class Part(NamedTuple):
    """A rank's range of a global batch: places in the epoch's order."""

    begin: int
    end: int


def next_batch(position: Position, size: int, global_batch: int, drop_remainder: bool) -> tuple[Position, Part]:
    """Return the position after the next global batch, and the batch's range; epochs follow each other without end."""
    epoch, offset = position
    left = size - offset
    if left <= 0 or (drop_remainder and left < global_batch):
        epoch, offset, left = epoch + 1, 0, size
    end = offset + min(global_batch, left)
    return Position(epoch, end), Part(offset, end)


def part_of(batch: Part, index: int, count: int) -> Part:
    """Return one of `count` parts of a batch; sizes differ by one at most, and a part may be empty."""
    size = batch.end - batch.begin
    return Part(batch.begin + size * index // count, batch.begin + size * (index + 1) // count)


class Shard(NamedTuple):
    """Whose parts of the global batches are wanted.

    Attributes:
        strategy: what distributes a batch where a rank has several local replicas.
    """

    rank: int = 0
    world_size: int = 1
    strategy: Any = None


class Dataset:
    """An endless iterator over this rank's parts of global batches of arrays.

    `next()` gives the source's structure (an array, a tuple or a dictionary of arrays) with the rank's samples; where
    there are several local replicas, a per-replica value of the strategy that was given.
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
            source: arrays that have one sample for each index of their first dimension.
            global_batch: samples in a step, over all ranks.
            seed: of the order of every epoch.
            shuffle: False keeps the source's order.
            drop_remainder: leave out an epoch's last batch where it is smaller than the others.
            shard: this rank among its peers.

        Raises:
            ValueError: arrays differ in length or are empty, or the batch is not between 1 and their length.
        """
        import numpy

        self._source, self._shard = _map(numpy.asarray, source), shard
        sizes = {len(array) for array in _leaves(self._source)}
        if len(sizes) != 1 or 0 in sizes:
            raise ValueError(f"the source's arrays have {sorted(sizes)} samples; wanted equal lengths above 0")
        self.size = sizes.pop()
        if global_batch < 1 or (drop_remainder and global_batch > self.size):
            raise ValueError(f"global_batch is {global_batch}, with {self.size} samples")
        self._global_batch, self._seed = global_batch, seed
        self._shuffle, self._drop_remainder = shuffle, drop_remainder
        self._local = 1 if shard.strategy is None else shard.strategy.num_replicas_in_sync // shard.world_size
        self._order: tuple[int, Any] = (-1, None)
        self.position = Position()
        self.ready_ns = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """Return this rank's part of the next global batch."""
        position, batch = next_batch(self.position, self.size, self._global_batch, self._drop_remainder)
        order = self._order_of(position.epoch)
        rank, world_size, strategy = self._shard

        def take(local_replica: int) -> Any:
            part = part_of(batch, rank * self._local + local_replica, world_size * self._local)
            indices = order[part.begin : part.end]
            return _map(lambda array: array[indices], self._source)

        if self._local > 1:
            value = strategy.experimental_distribute_values_from_function(
                lambda context: _tensors(take(context.replica_id_in_sync_group % self._local))
            )
        else:
            value = _tensors(take(0))
        self.position = position
        self.ready_ns = time.monotonic_ns()
        return value

    @property
    def epoch(self) -> int:
        """The epoch that the newest batch came from, counted from 0."""
        return self.position.epoch

    @property
    def steps_per_epoch(self) -> int:
        """Global batches in an epoch."""
        whole, rest = divmod(self.size, self._global_batch)
        return whole + (1 if rest and not self._drop_remainder else 0)

    def state(self) -> dict[str, Any]:
        """Return what a later run must know to go on here."""
        return {"epoch": self.position.epoch, "offset": self.position.offset, "seed": self._seed, "size": self.size}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on where `state()` was taken, with any batch size and on any number of ranks.

        Raises:
            ValueError: it was taken from another source, or with another seed.
        """
        if (state["size"], state["seed"]) != (self.size, self._seed):
            raise ValueError(
                f"the saved position is one of {state['size']} samples and seed {state['seed']}; "
                f"now there are {self.size} and {self._seed}"
            )
        self.position = Position(int(state["epoch"]), int(state["offset"]))

    def _order_of(self, epoch: int) -> Any:
        import numpy

        if self._order[0] != epoch:
            if self._shuffle:
                generator = numpy.random.Generator(numpy.random.Philox(key=[self._seed & (2**64 - 1), epoch]))
                self._order = (epoch, generator.permutation(self.size))
            else:
                self._order = (epoch, numpy.arange(self.size))
        return self._order[1]


def _leaves(source: Any) -> list[Any]:
    if isinstance(source, dict):
        return [leaf for value in source.values() for leaf in _leaves(value)]
    if isinstance(source, (tuple, list)):
        return [leaf for value in source for leaf in _leaves(value)]
    return [source]


def _map(function: Any, source: Any) -> Any:
    if isinstance(source, dict):
        return {key: _map(function, value) for key, value in source.items()}
    if isinstance(source, tuple) and hasattr(source, "_fields"):
        return type(source)(*(_map(function, value) for value in source))
    if isinstance(source, (tuple, list)):
        return type(source)(_map(function, value) for value in source)
    return function(source)


def _tensors(value: Any) -> Any:
    import tensorflow as tf

    return _map(tf.convert_to_tensor, value)
