"""Where samples come from: arrays, anything with a length that is loaded sample by sample, and generators.

A source says which samples a global batch has and gives them. The order of an epoch is a pure function of seed and
epoch, or the generator's own; what was taken of it is a number, so that any world goes on where another one ended.
"""

from __future__ import annotations

import inspect
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

_LOADERS = 4
"""Threads that load samples: what they do is mostly reading, or TensorFlow's, and neither holds the interpreter."""
_SIGN_EVERY_S = 1.0
"""How often who reads up to a position says that it gets on."""


class Position(NamedTuple):
    """What has been taken: `offset` samples of epoch `epoch`."""

    epoch: int = 0
    offset: int = 0


class Part(NamedTuple):
    """A range of an epoch's order: a global batch, or what a rank takes of it."""

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


def generator_of(seed: int, epoch: int) -> Any:
    """Return NumPy's generator of an epoch: the same on all ranks, and in each run."""
    import numpy

    return numpy.random.Generator(numpy.random.Philox(key=[seed & (2**64 - 1), epoch]))


class Indexed:
    """Samples that can be had in any order, by number.

    Attributes:
        size: samples in an epoch.
    """

    def __init__(self, size: int, seed: int, shuffle: bool) -> None:
        self.size, self._seed, self._shuffle = size, seed, shuffle
        self._order: tuple[int, Any] = (-1, None)

    def advance(self, position: Position, samples: int, drop_remainder: bool) -> tuple[Position, Part]:
        """Return the position after the next global batch of `samples`, and the batch's range."""
        return next_batch(position, self.size, samples, drop_remainder)

    def numbers(self, epoch: int, part: Part) -> Any:
        """Return the numbers of a part's samples."""
        import numpy

        if self._order[0] != epoch:
            draws = generator_of(self._seed, epoch)
            self._order = (epoch, draws.permutation(self.size) if self._shuffle else numpy.arange(self.size))
        return self._order[1][part.begin : part.end]


class Arrays(Indexed):
    """Arrays with one sample for each index of their first dimension: in memory, or mapped from files."""

    def __init__(self, arrays: Any, seed: int, shuffle: bool) -> None:
        """Check them; NumPy arrays are not copied.

        Raises:
            ValueError: they differ in length, or are empty.
        """
        import numpy

        self._arrays = map_structure(numpy.asarray, arrays)
        sizes = {len(array) for array in _leaves(self._arrays)}
        if len(sizes) != 1 or 0 in sizes:
            raise ValueError(f"the source's arrays have {sorted(sizes)} samples; wanted equal lengths above 0")
        super().__init__(sizes.pop(), seed, shuffle)

    def take(self, epoch: int, part: Part) -> Any:
        """Return the samples of a part, in the source's structure."""
        numbers = self.numbers(epoch, part)
        return map_structure(lambda array: array[numbers], self._arrays)


class Loaded(NamedTuple):
    """Samples that are loaded one by one: names of files and what reads them, or `TfRecords` and what parses them.

    Attributes:
        items: what is loaded, by number; it has a length.
        load: given one item, returns its sample: an array, or a tuple or dictionary of arrays, of one shape for all.
            Called in several threads, for the batch that comes next beside the step before.
    """

    items: Any
    load: Callable[[Any], Any]


class Loading(Indexed):
    """What `Loaded` says, done: threads load a batch, and the next one beside the step."""

    def __init__(self, source: Loaded, seed: int, shuffle: bool) -> None:
        """Load nothing yet.

        Raises:
            ValueError: there are no items, or what is given has no length.
        """
        self._items, self._load = source
        if not hasattr(self._items, "__len__") or not hasattr(self._items, "__getitem__"):
            raise ValueError(f"Loaded wants a sequence of what is loaded, not a {type(self._items).__name__}")
        if not len(self._items):
            raise ValueError("the source has no samples")
        super().__init__(len(self._items), seed, shuffle)
        self._ahead: dict[tuple[int, Part], list[Any]] = {}
        self._loaders: _Loaders | None = None

    def take(self, epoch: int, part: Part) -> Any:
        """Return the samples of a part, stacked; raises what loading one of them has raised."""
        coming = self._ahead.pop((epoch, part), None) or self._begin(epoch, part)
        samples = [each.result() for each in coming]
        return stacked(samples) if samples else map_structure(lambda array: array[:0], stacked([self._one(0)]))

    def expect(self, epoch: int, parts: Sequence[Part]) -> None:
        """Begin to load what will be taken next, beside the step before."""
        for forgotten in self._ahead.values():
            for each in forgotten:
                each.cancel()
        self._ahead = {(epoch, part): self._begin(epoch, part) for part in parts}

    def _begin(self, epoch: int, part: Part) -> list[Any]:
        if self._loaders is None:
            self._loaders = _Loaders(self._one)
        return [self._loaders.submit(int(number)) for number in self.numbers(epoch, part)]

    def _one(self, index: int) -> Any:
        return self._load(self._items[index])


class _Loaders:
    """Threads that nobody waits for at the interpreter's end, unlike `concurrent.futures`' own: a disk may hang."""

    def __init__(self, load: Callable[[int], Any]) -> None:
        self._load, self._wanted = load, queue.SimpleQueue()  # type: Callable[[int], Any], queue.SimpleQueue[Any]
        for number in range(_LOADERS):
            threading.Thread(target=self._run, name=f"keepstep-load-{number}", daemon=True).start()

    def submit(self, number: int) -> Any:
        """Have a sample loaded; returns a future."""
        from concurrent.futures import Future

        future: Any = Future()
        self._wanted.put((future, number))
        return future

    def _run(self) -> None:
        while True:
            future, number = self._wanted.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(self._load(number))
                except BaseException as error:  # it is raised where the batch is taken
                    future.set_exception(error)


class Stream:
    """Samples that can only be had one after another, from a function that begins an epoch.

    Each rank reads all samples of an epoch and keeps its own; to go on somewhere it reads up to there.

    Attributes:
        size: samples in an epoch; 0 until one has ended.
        on_read: called once a second while samples are read only to come to a position.
    """

    def __init__(self, begin: Callable[..., Any], seed: int) -> None:
        """Read nothing yet.

        Args:
            begin: returns an iterable of an epoch's samples. Given a NumPy generator where it takes an argument, one
                of the seed and the epoch, and to give the same samples in the same order for the same generator.
            seed: of the generators.
        """
        self.size, self._seed, self._function = 0, seed, begin
        self._wants_generator = _wants_argument(begin)
        self.on_read: Callable[[], None] = lambda: None
        self._samples: Iterator[Any] = iter(())
        self._at = Position(-1)
        self._rows: tuple[Position, list[Any]] = (Position(-1), [])

    def advance(self, position: Position, samples: int, drop_remainder: bool) -> tuple[Position, Part]:
        """Read the next global batch of `samples`; return the position after it, and the batch's range.

        Raises:
            ValueError: an epoch has no samples, or where the remainder is dropped, fewer than a batch.
        """
        rows = self._read(position, samples)
        if not rows or (drop_remainder and len(rows) < samples):
            position = Position(position.epoch + 1)
            rows = self._read(position, samples)
            if not rows or (drop_remainder and len(rows) < samples):
                raise ValueError(f"the source gave {len(rows)} samples for epoch {position.epoch}, of {samples} wanted")
        self._rows = (position, rows)
        after = Position(position.epoch, position.offset + len(rows))
        return after, Part(position.offset, after.offset)

    def take(self, epoch: int, part: Part) -> Any:
        """Return the samples of a part of the batch that was read last."""
        _, offset = self._rows[0]
        rows = self._rows[1][part.begin - offset : part.end - offset]
        return stacked(rows) if rows else map_structure(lambda array: array[:0], stacked(self._rows[1][:1]))

    def go_to(self, position: Position) -> None:
        """Read up to there.

        Raises:
            ValueError: the epoch ends before.
        """
        if self._at.epoch != position.epoch or self._at.offset > position.offset:
            draws = (generator_of(self._seed, position.epoch),) if self._wants_generator else ()
            self._samples, self._at = iter(self._function(*draws)), Position(position.epoch)
        offset, self._at = self._at.offset, Position(-1)  # where it is, is not known once reading has failed
        told_s = time.monotonic()
        for _ in itertools.islice(self._samples, position.offset - offset):
            offset += 1
            if time.monotonic() > told_s + _SIGN_EVERY_S:
                told_s = time.monotonic()
                self.on_read()
        if offset != position.offset:
            raise ValueError(
                f"epoch {position.epoch} of the source has ended after {offset} samples; "
                f"{position.offset} of it were taken before"
            )
        self._at = position

    def _read(self, position: Position, samples: int) -> list[Any]:
        self.go_to(position)
        self._at = Position(-1)
        rows = list(itertools.islice(self._samples, samples))
        self._at = Position(position.epoch, position.offset + len(rows))
        if len(rows) < samples:
            self.size = self._at.offset
        return rows


def open_source(source: Any, seed: int, shuffle: bool) -> Arrays | Loading | Stream:
    """Return the source that a script has described.

    Raises:
        ValueError: it has no samples, or is nothing that samples can be had from again.
    """
    if isinstance(source, Loaded):
        return Loading(source, seed, shuffle)
    if hasattr(source, "as_numpy_iterator"):  # of tf.data, which begins anew each time
        return Stream(lambda: source.as_numpy_iterator(), seed)
    if hasattr(source, "__next__"):
        raise ValueError("an iterator can be read but once: give a function that returns it, or a tf.data.Dataset")
    if callable(source):
        return Stream(source, seed)
    return Arrays(source, seed, shuffle)


def _wants_argument(function: Callable[..., Any]) -> bool:
    """Whether it can not be called without one."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return any(each.kind in positional and each.default is inspect.Parameter.empty for each in parameters)


def stacked(samples: Sequence[Any]) -> Any:
    """Return samples of one structure as one, whose leaves have one more dimension in front.

    Raises:
        ValueError: they differ in structure or shape.
    """
    if len({_form(sample) for sample in samples}) > 1:
        raise ValueError(f"samples of one batch differ in structure: {sorted({str(_form(each)) for each in samples})}")
    return _stacked(samples)


def _form(sample: Any) -> Any:
    """What must be the same of all samples: keys and lengths."""
    if isinstance(sample, dict):
        return tuple((key, _form(value)) for key, value in sorted(sample.items(), key=lambda item: str(item[0])))
    if isinstance(sample, (tuple, list)):
        return tuple(map(_form, sample))
    return ()


def _stacked(samples: Sequence[Any]) -> Any:
    import numpy

    first = samples[0]
    if isinstance(first, dict):
        return {key: _stacked([sample[key] for sample in samples]) for key in first}
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(_stacked(column) for column in zip(*samples)))
    if isinstance(first, (tuple, list)):
        return type(first)(_stacked(column) for column in zip(*samples))
    if isinstance(first, (bytes, str)):  # of another type NumPy would drop zeros at the end
        return numpy.array(samples, dtype=object)
    return numpy.stack([numpy.asarray(sample) for sample in samples])


def map_structure(function: Any, source: Any) -> Any:
    """Return the structure with a function applied to each leaf."""
    if isinstance(source, dict):
        return {key: map_structure(function, value) for key, value in source.items()}
    if isinstance(source, tuple) and hasattr(source, "_fields"):
        return type(source)(*(map_structure(function, value) for value in source))
    if isinstance(source, (tuple, list)):
        return type(source)(map_structure(function, value) for value in source)
    return function(source)


def _leaves(source: Any) -> list[Any]:
    if isinstance(source, dict):
        return [leaf for value in source.values() for leaf in _leaves(value)]
    if isinstance(source, (tuple, list)):
        return [leaf for value in source for leaf in _leaves(value)]
    return [source]
