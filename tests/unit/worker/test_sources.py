"""Samples of files and of functions are had once an epoch, in an order that any world finds again."""

from __future__ import annotations

import random
import struct
import sys
import threading
from collections import Counter, UserList
from types import SimpleNamespace
from typing import Any

import pytest

from keepstep_worker import dataset, sources
from keepstep_worker.sources import Loaded, Loading, Part, Position, Stream, open_source
from keepstep_worker.tfrecords import TfRecords

START = Position()


class Draws:
    """Stands for NumPy's generator of a seed and an epoch."""

    def __init__(self, key: list[int]) -> None:
        self.key = key

    def permutation(self, size: int) -> list[int]:
        return sorted(range(size), key=lambda place: hash((*self.key, place)))


@pytest.fixture(autouse=True)
def numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is none where no TensorFlow is; something like lists does."""
    draws = SimpleNamespace(Generator=Draws, Philox=lambda key: key)
    stand_in = SimpleNamespace(
        asarray=lambda value: value,
        stack=UserList,
        array=lambda samples, dtype: UserList(samples),
        arange=lambda size: list(range(size)),
        random=draws,
    )
    monkeypatch.setitem(sys.modules, "numpy", stand_in)


def taken(source: Any, batch: int, steps: int, drop: bool = False, begin: Position = START) -> list[Any]:
    """What some steps take, with the epoch of each."""
    position, found = begin, []
    for _ in range(steps):
        position, part = source.advance(position, batch, drop)
        found += [(position.epoch, sample) for sample in source.take(position.epoch, part)]
    return found


def test_items_are_loaded_in_the_epochs_order_each_once():
    source = Loading(Loaded([f"file {n}" for n in range(10)], lambda name: name.upper()), seed=3, shuffle=True)
    found = taken(source, 4, 6)
    for epoch in (0, 1):
        assert sorted(sample for each, sample in found if each == epoch) == sorted(f"FILE {n}" for n in range(10))
    assert found == taken(Loading(Loaded([f"file {n}" for n in range(10)], str.upper), seed=3, shuffle=True), 4, 6)


def test_what_comes_next_is_loaded_beside_the_step():
    loaded, both = Counter(), threading.Barrier(3, timeout=20)

    def load(item: int) -> int:
        loaded[item] += 1
        both.wait()  # two are loaded at one time
        return item

    source = Loading(Loaded(range(6), load), seed=1, shuffle=False)
    source.expect(0, [Part(0, 2)])
    both.wait()
    assert source.take(0, Part(0, 2)) == [0, 1]
    assert loaded == {0: 1, 1: 1}


def test_a_dataset_has_the_next_batch_loaded_beside_the_step(monkeypatch):
    monkeypatch.setattr(dataset, "_tensors", lambda value: value)
    monkeypatch.setattr(dataset, "_unshared_variable", lambda value: SimpleNamespace(assign=lambda value: None))
    loaded = {number: threading.Event() for number in range(6)}
    data = dataset.Dataset(Loaded(range(6), lambda item: loaded[item].set() or item), global_batch=2, shuffle=False)
    assert next(data) == [0, 1]
    assert loaded[2].wait(20) and loaded[3].wait(20)
    assert not loaded[4].is_set()
    assert [next(data), next(data), next(data)] == [[2, 3], [4, 5], [0, 1]]


def test_what_was_expected_and_is_not_wanted_is_forgotten():
    source = Loading(Loaded(range(6), str), seed=1, shuffle=False)
    source.expect(0, [Part(0, 2)])
    source.expect(0, [Part(2, 4)])
    assert source.take(0, Part(0, 2)) == ["0", "1"]
    assert source.take(0, Part(2, 4)) == ["2", "3"]


def test_an_empty_part_has_the_structure_of_a_sample():
    source = Loading(Loaded(["a", "b"], lambda name: {"name": name, "pair": (name, name)}), seed=1, shuffle=False)
    assert source.take(0, Part(1, 1)) == {"name": [], "pair": ([], [])}
    stream = Stream(lambda: iter([(1, "a"), (2, "b")]), 1)
    assert stream.advance(Position(), 2, False) == (Position(0, 2), Part(0, 2))
    assert stream.take(0, Part(2, 2)) == ([], [])


def test_what_loading_raises_is_raised_where_the_batch_is_taken():
    def load(item: int) -> int:
        raise OSError(f"no file {item}")

    with pytest.raises(OSError, match="no file 1"):
        Loading(Loaded(range(1, 3), load), seed=1, shuffle=False).take(0, Part(0, 1))


@pytest.mark.parametrize("seed", range(40))
def test_a_functions_samples_are_taken_once_an_epoch_however_often_one_begins_again(seed):
    draw = random.Random(seed)
    size, batch = draw.randint(1, 40), draw.randint(1, 12)
    stops = [draw.randint(0, 5) for _ in range(draw.randint(0, 6))]
    position, found = Position(), Counter()
    for steps in [*stops, 2 * size]:
        source = Stream(lambda: iter(range(size)), 1)  # a new process, that goes on at the position
        for _ in range(steps):
            position, part = source.advance(position, batch, False)
            found.update((position.epoch, sample) for sample in source.take(position.epoch, part))
    assert position.epoch > 0
    assert all(found[epoch, sample] == 1 for epoch in range(position.epoch) for sample in range(size))


def test_a_function_is_given_the_epochs_generator_where_it_takes_one():
    seen = []

    def begin(draws: Draws) -> Any:
        seen.append(draws.key)
        return draws.permutation(5)

    found = taken(Stream(begin, 9), 5, 2)
    assert seen == [[9, 0], [9, 1]]
    assert [sample for _, sample in found[:5]] == Draws([9, 0]).permutation(5)


def test_the_length_of_a_functions_epoch_is_known_once_one_has_ended():
    source = Stream(lambda: range(5), 1)
    assert source.size == 0
    assert [sample for _, sample in taken(source, 2, 2)] == [0, 1, 2, 3]
    assert source.size == 0
    taken(source, 2, 1, begin=Position(0, 4))
    assert source.size == 5


def test_with_the_remainder_dropped_a_function_gives_whole_batches():
    found = taken(Stream(lambda: range(5), 1), 2, 4, drop=True)
    assert found == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3)]
    with pytest.raises(ValueError, match="gave 5 samples for epoch 1, of 6 wanted"):
        taken(Stream(lambda: range(5), 1), 6, 1, drop=True)


def test_a_function_that_gives_less_than_it_did_is_told():
    with pytest.raises(ValueError, match="epoch 2 of the source has ended after 5 samples; 6 of it were taken before"):
        Stream(lambda: range(5), 1).go_to(Position(2, 6))
    with pytest.raises(ValueError, match="gave 0 samples"):
        Stream(lambda: (), 1).advance(Position(), 4, False)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (iter(()), "an iterator can be read but once"),
        (Loaded([], str), "no samples"),
        (Loaded(iter(()), str), "wants a sequence"),
        (["", "ab"], "equal lengths"),
    ],
)
def test_what_no_samples_can_be_had_from_is_refused(source, says):
    with pytest.raises(ValueError, match=says):
        open_source(source, 1, True)


def test_a_tf_data_pipeline_begins_anew_each_epoch():
    pipeline = SimpleNamespace(as_numpy_iterator=lambda: iter(range(3)))
    assert taken(open_source(pipeline, 1, True), 3, 2) == [(e, n) for e in (0, 1) for n in range(3)]


# --- TFRecord files --------------------------------------------------------------------------------------------------


def write(path: Any, records: list[bytes]) -> Any:
    path.write_bytes(b"".join(struct.pack("<QI", len(each), 7) + each + b"crc!" for each in records))
    return path


def test_records_of_several_files_have_numbers(tmp_path):
    records = TfRecords([
        write(tmp_path / "a", [b"one", b""]), write(tmp_path / "empty", []), write(tmp_path / "b", [b"three" * 1000]),
    ])  # fmt: skip
    assert [len(records), records[0], records[1], records[2], records[-1]] == [
        3, b"one", b"", b"three" * 1000, b"three" * 1000,
    ]  # fmt: skip
    with pytest.raises(IndexError, match="record 3 of 3"):
        records[3]
    source = open_source(Loaded(records, len), 1, False)
    assert source.take(0, Part(0, 3)) == [3, 0, 5000]
    (tmp_path / "b").write_bytes((tmp_path / "b").read_bytes()[:99])
    with pytest.raises(ValueError, match="b: record at byte 0 has 87 bytes left of 5000"):
        records[2]


@pytest.mark.parametrize("cut", [1, 4, 8, 12])
def test_a_torn_file_is_named_with_the_place(tmp_path, cut):
    whole = write(tmp_path / "torn", [b"one", b"two"]).read_bytes()
    (tmp_path / "torn").write_bytes(whole[:-cut])
    with pytest.raises(ValueError, match=r"torn: at byte 19 there is no whole record"):
        TfRecords([tmp_path / "torn"])


def test_a_file_that_is_no_such_file_is_named(tmp_path):
    (tmp_path / "text").write_text("these are words, and no records at all")
    with pytest.raises(ValueError, match="text: at byte 0 there is no whole record"):
        TfRecords([tmp_path / "text"])
    with pytest.raises(FileNotFoundError, match="absent"):
        TfRecords([tmp_path / "absent"])


def test_structures_are_stacked_leaf_by_leaf():
    assert sources.stacked([{"a": (1, 2)}, {"a": (3, 4)}]) == {"a": ([1, 3], [2, 4])}


@pytest.mark.parametrize("other", [{"a": 1, "b": 2}, {"b": 1}, {"a": (1, 2)}, 1])
def test_samples_of_different_structure_are_refused(other):
    with pytest.raises(ValueError, match="differ in structure"):
        sources.stacked([{"a": 1}, other])


def test_a_function_that_can_do_without_a_generator_is_given_none():
    def samples(path: str = "here", *more: str, **options: str) -> Any:
        return iter([path])

    assert [sample for _, sample in taken(Stream(samples, 1), 1, 2)] == ["here", "here"]


def test_a_source_that_fails_is_read_again_from_where_the_training_is():
    fails = iter([True])

    def samples() -> Any:
        for number in range(6):
            if number == 3 and next(fails, False):
                raise OSError("a disk")
            yield number

    source = Stream(samples, 1)
    assert [sample for _, sample in taken(source, 2, 1)] == [0, 1]
    with pytest.raises(OSError, match="a disk"):
        source.advance(Position(0, 2), 2, False)
    assert [sample for _, sample in taken(source, 2, 2, begin=Position(0, 2))] == [2, 3, 4, 5]


def test_who_reads_up_to_a_position_gives_signs_of_life(monkeypatch):
    now, signs = [0.0], []
    monkeypatch.setattr(sources.time, "monotonic", lambda: now[0])

    def samples() -> Any:
        for number in range(100):
            now[0] += 0.3
            yield number

    source = Stream(samples, 1)
    source.on_read = lambda: signs.append(now[0])
    source.go_to(Position(0, 20))
    assert len(signs) == 5
