"""The orders in which `tf.data` gives samples: counted, so that a resumed training goes on with the one that is due.

What shuffles anew draws the seeds of an order whenever an iterator is made of it, whether that is read or not; and most
datasets make an iterator of what they are derived from at once, a few when they are read themselves (TensorFlow 2.21).
Which order is next is therefore told by how many iterators were made before, and read; after a restart as many are
made, of the sources of order alone, unread.

Not seen are the draws below a `repeat`, a `cache` and a `snapshot`, which make no iterator in each epoch or several,
and those within the function of a `flat_map` or an `interleave`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

_DRAWS = {"_ShuffleDataset": ("_reshuffle_each_iteration", True), "_RandomDataset": ("_rerandomize", False)}
"""What may draw: the attribute that tells whether it does so for each iterator, and what it is by default."""
_WHEN_READ = {"_ShuffleDataset": 0, "_CopyToDeviceDataset": 0, "_ConcatenateDataset": 1}
"""The first input of which an iterator is made only when the dataset is read."""
_UNSEEN = frozenset({"_RepeatDataset", "CacheDataset", "_SnapshotDataset"})

_made: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def advance(iterator: Any, count: int) -> None:
    """Read up to `count` batches and drop them.

    Raises:
        StopIteration: there was none left.
    """
    for index in range(count):
        try:
            next(iterator)
        except StopIteration:
            if index == 0:
                raise
            return


def note_iterator(dataset: Any) -> None:
    """Count an iterator that is made of a `tf.data.Dataset`; of anything else there is nothing to count."""
    _count(_Sources.of(dataset).at_once)


def note_reading(dataset: Any) -> None:
    """Count those iterators that are made when one of a dataset is read to its end."""
    _count(_Sources.of(dataset).when_read)


def begin(dataset: Any, iterable: Any) -> Any:
    """Return an iterator, counted, that is to be read at once, of what gives a dataset's samples."""
    note_iterator(dataset)
    note_reading(dataset)
    return iter(iterable)


def made(dataset: Any) -> list[int]:
    """Return for each source of order below a dataset how many iterators were made of it so far."""
    return [_made.get(source, 0) for source in _Sources.of(dataset).distinct()]


def catch_up(dataset: Any, counts: Sequence[int], ahead: int = 0) -> None:
    """Make as many iterators as had been made when `made` gave these counts, in an earlier process.

    Args:
        dataset: what may draw.
        counts: one for each source.
        ahead: how many iterators of the dataset are about to be made anyway, which were counted.
    """
    sources = _Sources.of(dataset)
    for source, count in zip(sources.distinct(), counts, strict=False):
        for _ in range(_made.get(source, 0), count - ahead * sources.at_once.count(source)):
            iter(source)
            _count([source])


def _count(sources: Iterable[Any]) -> None:
    for source in sources:
        _made[source] = _made.get(source, 0) + 1


class _Sources(NamedTuple):
    """What draws when an iterator is made of a dataset, and when that is read; each as often as it does."""

    at_once: list[Any]
    when_read: list[Any]

    @classmethod
    def of(cls, dataset: Any) -> _Sources:
        found = cls([], [])

        def visit(each: Any, is_read: bool) -> None:
            kind = type(each).__name__
            if kind in _UNSEEN or not hasattr(each, "_inputs"):
                return
            attribute, draws = _DRAWS.get(kind, ("", False))
            told = getattr(each, attribute, None)
            if draws if told is None else told:
                found[is_read].append(each)
            inputs = each._inputs()
            for index, below in enumerate(inputs):
                visit(below, is_read or index >= _WHEN_READ.get(kind, len(inputs)))

        visit(dataset, is_read=False)
        return found

    def distinct(self) -> list[Any]:
        return list(dict.fromkeys([*self.at_once, *self.when_read]))
