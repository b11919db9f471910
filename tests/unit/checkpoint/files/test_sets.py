"""Which files belong together, from their names; and what of it is whole on disk."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from keepstep.checkpoint.files.contents import check_set, read_epoch, read_listing, read_sets, read_state
from keepstep.checkpoint.files.sets import FileSet, Kind, ListedFile, find_sets, is_ignored, parse_step
from keepstep.checkpoint.files.state_file import NamedCheckpoints, format_state, parse_state
from keepstep.checkpoint.files.unfit import UnfitFile

GOLDEN = Path(__file__).parent / "golden"
NONE = NamedCheckpoints()


def listing(*names: str, times: dict[str, int] | None = None) -> list[ListedFile]:
    """Files that were written one after the other."""
    return [ListedFile(name, 10, (times or {}).get(name, number), number) for number, name in enumerate(names)]


def names(found: tuple[FileSet, ...]) -> list[str]:
    return [each.name for each in found]


def bundle(prefix: str, shards: int = 1) -> list[str]:
    return [*(f"{prefix}.data-{number:05d}-of-{shards:05d}" for number in range(shards)), f"{prefix}.index"]


def test_a_bundle_is_its_data_files_and_its_index() -> None:
    files = listing(*bundle("ckpt-3", 2), "checkpoint")
    (found,) = find_sets(files, NamedCheckpoints("ckpt-3", frozenset({"ckpt-3"})))
    assert found == FileSet(Kind.TENSORFLOW, "ckpt-3", tuple(files[:3]), 3, is_named=True)
    assert (found.mtime_ns, found.size_bytes) == (2, 30)


def test_the_older_savers_graph_belongs_to_it() -> None:
    (found,) = find_sets(listing(*bundle("model.ckpt-100"), "model.ckpt-100.meta"), NONE)
    assert ([file.name for file in found.files][-1], found.step, found.is_named) == ("model.ckpt-100.meta", 100, False)


@pytest.mark.parametrize("missing", range(4))
def test_a_bundle_that_lacks_a_file_is_none(missing: int) -> None:
    wanted = bundle("ckpt-3", 3)
    del wanted[missing]
    assert find_sets(listing(*wanted, "ckpt-3.meta"), NONE) == ()


def test_data_files_of_another_number_do_not_belong_to_it() -> None:
    old, new = bundle("m-1", 2)[:2], bundle("m-1", 3)
    (found,) = find_sets(listing(*old, *new), NONE)
    assert [file.name for file in found.files] == new
    (found,) = find_sets(listing(old[0], *new), NONE)
    assert [file.name for file in found.files] == new
    assert find_sets(listing(*new[:2], "m-1.index"), NONE) == ()


@pytest.mark.parametrize(
    "name",
    [
        "part-00000-of-00001.data-00000-of-00001.tempstate123456789",
        "part-00000-of-00001.index.tempstate42",
        "checkpoint.tmp0123456789abcdef0123456789abcdef",
        "ckpt-1.index.tmp0123456789abcdef0123456789abcdef",
        "workertemp_1",
        "model.keras.sagemaker-uploading",
        "model.keras.sagemaker-uploaded",
        "model.keras.sagemaker-ignore",
        ".sagemaker-ignore",
        ".model.keras",
        "latest.weights.h5.bkp",
    ],
)
def test_what_is_nobodys_checkpoint_is_passed_over(name: str) -> None:
    assert is_ignored(name)


@pytest.mark.parametrize("name", ["high_temperature.keras", "a_temp.keras", "checkpoint", "m.tmp.h5", "room_temp"])
def test_what_may_be_one_is_not(name: str) -> None:
    assert not is_ignored(name)


def test_markers_and_hidden_files_make_no_sets() -> None:
    marked = [f"{name}.sagemaker-{mark}" for name in bundle("ckpt-1") for mark in ("uploading", "uploaded")]
    assert find_sets(listing(*marked, ".hidden.keras", "x.keras.sagemaker-ignore", *bundle(".ckpt-1")), NONE) == ()


def test_what_keras_writes_is_known_by_its_name() -> None:
    files = listing("a.keras", "b.weights.h5", "c.h5", "d.hdf5", "notes.txt", "events.out.tfevents.1.host")
    found = {each.name: each.kind for each in find_sets(files, NONE)}
    assert found == {"a.keras": Kind.KERAS, "b.weights.h5": Kind.WEIGHTS, "c.h5": Kind.HDF5, "d.hdf5": Kind.HDF5}


def test_weights_in_several_files_are_no_sets_each() -> None:
    parts = ["m.weights.json", "m_00000.weights.h5", "m_00001.weights.h5"]
    assert find_sets(listing(*parts), NONE) == ()
    assert names(find_sets(listing(*parts[1:]), NONE)) == parts[1:]


def test_the_backup_of_keras_is_a_pair() -> None:
    weights, metadata = "latest.weights.h5", "training_metadata.json"
    (found,) = find_sets(listing(weights, metadata), NONE)
    assert (found.kind, [file.name for file in found.files]) == (Kind.BACKUP, [weights, metadata])
    assert find_sets(listing(metadata, weights), NONE) == ()
    (found,) = find_sets(listing(metadata, weights, times={metadata: 5, weights: 5}), NONE)
    assert found.kind is Kind.BACKUP
    assert find_sets(listing(metadata), NONE) == ()
    (found,) = find_sets(listing(weights), NONE)
    assert found.kind is Kind.WEIGHTS


@pytest.mark.parametrize(
    ("kind", "name", "step"),
    [
        (Kind.TENSORFLOW, "ckpt-123", 123),
        (Kind.TENSORFLOW, "model.ckpt-0", 0),
        (Kind.TENSORFLOW, "run2-ckpt-05-1234", 1234),
        (Kind.TENSORFLOW, "cp-0004.ckpt", 4),
        (Kind.TENSORFLOW, "variables", None),
        (Kind.TENSORFLOW, "-7", 7),
        (Kind.TENSORFLOW, f"ckpt-{'9' * 30}", None),
        (Kind.KERAS, "model.05-0.21.keras", 5),
        (Kind.KERAS, "05.keras", 5),
        (Kind.KERAS, "best.keras", None),
        (Kind.KERAS, "resnet50-12.keras", 12),
        (Kind.KERAS, "resnet50.keras", None),
        (Kind.KERAS, "mnist-28x28-e3.keras", 3),
        (Kind.KERAS, "a-1e5.keras", None),
        (Kind.KERAS, "2024-05-01.keras", None),
        (Kind.KERAS, "run-2-epoch-05.keras", 5),
        (Kind.KERAS, "epoch=7-val_loss=0.31.keras", 7),
        (Kind.KERAS, "epoch_3_step_20.keras", None),
        (Kind.KERAS, "acc-0.93.keras", None),
        (Kind.WEIGHTS, "model.05.weights.h5", 5),
        (Kind.WEIGHTS, "Epoch12.weights.h5", 12),
        (Kind.HDF5, "weights.11-0.44.hdf5", 11),
        (Kind.BACKUP, "latest.weights.h5", None),
    ],
)
def test_the_step_is_what_the_name_tells(kind: Kind, name: str, step: int | None) -> None:
    assert parse_step(kind, name) == step


def test_sets_of_one_writer_are_in_the_order_of_their_steps() -> None:
    """As SageMaker downloads them, 9 may be written behind 10."""
    files = listing(*bundle("ckpt-10"), *bundle("ckpt-9"), *bundle("ckpt-100"), *bundle("ckpt-8"))
    assert names(find_sets(files, NONE)) == ["ckpt-8", "ckpt-9", "ckpt-10", "ckpt-100"]
    latest = NamedCheckpoints("ckpt-9", frozenset({"ckpt-9"}))
    assert names(find_sets(files, latest))[-1] == "ckpt-9"


def test_writers_are_in_the_order_of_their_newest_sets() -> None:
    files = listing("model.01-0.9.keras", "best.keras", *bundle("ckpt-1"), "model.02-0.8.keras", *bundle("ckpt-2"))
    assert names(find_sets(files, NONE)) == [
        *("best.keras", "model.01-0.9.keras", "model.02-0.8.keras", "ckpt-1", "ckpt-2")
    ]
    assert names(find_sets(reversed(files), NONE)) == names(find_sets(files, NONE))


def test_the_state_file_is_read() -> None:
    assert read_state(GOLDEN / "managed") == NamedCheckpoints("ckpt-2", frozenset({"ckpt-1", "ckpt-2"}))
    assert parse_state('model_checkpoint_path: "/opt/ml/checkpoints/ckpt-7"\n').latest == "ckpt-7"
    for text in ("", "\0\1", 'model_checkpoint_path: "ckpt', 'other: "x"', 'model_checkpoint_path: ""'):
        assert parse_state(text) == NONE


@pytest.mark.parametrize("prefix", ["ckpt-1", 'a "b"\\c', "é", "tab\t", "\udcff", "new\nline"])
def test_a_state_file_that_is_written_names_its_checkpoint(prefix: str) -> None:
    text = format_state([(prefix, 5_500_000_000)])
    assert text.isascii()
    assert text.endswith("\nall_model_checkpoint_timestamps: 5.5\nlast_preserved_timestamp: 4.5\n")
    assert parse_state(text) == NamedCheckpoints(prefix, frozenset({prefix}))


def test_escapes_are_those_of_c() -> None:
    assert parse_state(r'model_checkpoint_path: "\303\251-\x41\n\"\\"').latest == 'é-A\n"\\'


@pytest.mark.parametrize(
    ("folder", "wanted"),
    [
        ("managed", ["ckpt-1", "ckpt-2"]),
        ("sharded", ["model.ckpt-40"]),
        ("iterator", ["pipeline"]),
        ("keras", ["legacy.h5", "model.05-0.21.keras", "model.05.weights.h5"]),
        ("backup", ["latest.weights.h5"]),
    ],
)
def test_real_folders_hold_whole_sets(tmp_path: Path, folder: str, wanted: list[str]) -> None:
    copied = Path(shutil.copytree(GOLDEN / folder, tmp_path / folder))
    order = ["latest.weights.h5", "training_metadata.json"]
    for number, path in enumerate(
        sorted(copied.iterdir(), key=lambda path: order.index(path.name) if path.name in order else 0)
    ):
        os.utime(path, ns=(0, number))
    found = read_sets(copied)
    assert sorted(names(found)) == wanted
    for each in found:
        check_set(copied, each)


def test_the_epoch_of_a_backup_is_read(tmp_path: Path) -> None:
    assert read_epoch(GOLDEN / "backup") == 2
    (tmp_path / "training_metadata.json").write_text('{"epoch": 2')
    with pytest.raises(UnfitFile, match="wanted: epoch and batch"):
        read_epoch(tmp_path)
    (tmp_path / "training_metadata.json").write_bytes(bytes(2 << 20))
    with pytest.raises(UnfitFile, match="wanted: a small file"):
        read_epoch(tmp_path)
    with pytest.raises(UnfitFile, match="No such file"):
        read_epoch(tmp_path / "none")


def test_only_regular_files_are_listed(tmp_path: Path) -> None:
    (tmp_path / "model.keras").write_bytes(b"x")
    (tmp_path / "link.keras").symlink_to("model.keras")
    (tmp_path / "folder.keras").mkdir()
    os.mkfifo(tmp_path / "pipe.keras")
    (found,) = read_listing(tmp_path)
    status = (tmp_path / "model.keras").stat()
    assert found == ListedFile("model.keras", 1, status.st_mtime_ns, status.st_ino)


def test_folders_that_can_not_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(UnfitFile, match="none: No such file"):
        read_sets(tmp_path / "none")
    assert read_state(tmp_path / "none") == NONE


def test_a_folder_of_its_name_is_no_state_file(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    assert read_state(tmp_path) == NONE
    assert read_sets(tmp_path) == ()


def test_parts_that_are_not_merged_yet_make_no_set() -> None:
    assert find_sets(listing(*bundle("part-00000-of-00001"), *bundle("part-1")), NONE)[0].name == "part-1"
    assert len(find_sets(listing(*bundle("part-00000-of-00001"), *bundle("part-1")), NONE)) == 1


def test_any_name_may_be_a_prefix() -> None:
    (found,) = find_sets(listing(*bundle("two\nlines-1")), NONE)
    assert found.name == "two\nlines-1"
