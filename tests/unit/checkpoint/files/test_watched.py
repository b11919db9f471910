"""The newest whole set of each writer is copied, and what is torn is not. Source of the files: `golden`."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

from keepstep.checkpoint.files.watched import WRITERS_MAX, Edition, Watched
from tests.support.script_files import contents, lay, lay_again, tear


def labels(edition: Edition) -> list[str]:
    return [f"{each.folder}/{each.found.name}" if each.folder else each.found.name for each in edition.sets]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def watched(tmp_path: Path, root: Path) -> Watched:
    return Watched(root, tmp_path / "spool", 4)


def test_a_folder_that_is_not_there_yet_has_nothing(watched: Watched) -> None:
    assert watched.scan() == (Edition(4, ()), ())


def test_the_newest_set_of_each_writer_is_copied(watched: Watched, root: Path) -> None:
    lay("managed", root)
    lay("backup", root / "backup")
    lay("keras", root / "best" / "ever")
    edition, trouble = watched.scan()
    assert trouble == () and edition.number == 5
    assert labels(edition) == [
        "ckpt-2",
        "backup/latest.weights.h5",
        "best/ever/legacy.h5",
        "best/ever/model.05-0.21.keras",
        "best/ever/model.05.weights.h5",
    ]
    place = edition.sets[0].place
    assert {name: data for name, data in contents(root).items() if name.startswith("ckpt-2")} == {
        name: data for name, data in contents(place).items() if name != "checkpoint"
    }


def test_the_variables_of_a_saved_model_are_no_checkpoint(watched: Watched, root: Path) -> None:
    """They can not be loaded without the graph, which is never copied; other bundles in folders of that name can."""
    lay("many", root / "best" / "variables", rename=("ckpt-7", "variables"))
    assert watched.scan() == (Edition(4, ()), ())
    lay("many", root / "variables")
    lay("many", root / "epoch", rename=("ckpt-7", "variables"))
    edition, trouble = watched.scan()
    assert (labels(edition), trouble) == (["epoch/variables", "variables/ckpt-7"], ())


def test_nothing_new_is_no_new_edition(watched: Watched, root: Path) -> None:
    lay("managed", root)
    assert watched.scan()[0] == watched.scan()[0]


def test_a_newer_set_takes_the_place_of_the_older_one(watched: Watched, root: Path, tmp_path: Path) -> None:
    lay("many", root)
    before, _ = watched.scan()
    lay("many", root, rename=("-7", "-8"), at_s=2_000)
    after, _ = watched.scan()
    assert (labels(before), labels(after)) == (["ckpt-7"], ["ckpt-8"])
    assert after.number == before.number + 1
    assert [path.name for path in (tmp_path / "spool").iterdir()] == [after.sets[0].place.name]


def test_a_copy_that_is_read_stays(watched: Watched, root: Path) -> None:
    lay("many", root)
    watched.scan()
    with watched.reading() as edition:
        lay("many", root, rename=("-7", "-8"), at_s=2_000)
        watched.scan()
        assert contents(edition.sets[0].place)
    assert not edition.sets[0].place.exists()


def test_what_is_torn_is_told_once_and_not_taken(watched: Watched, root: Path) -> None:
    lay("many", root)
    watched.scan()
    tear(lay("many", root, rename=("-7", "-8"), at_s=2_000)[0])
    edition, trouble = watched.scan()
    assert labels(edition) == ["ckpt-7"] and len(trouble) == 1 and "ckpt-8" in trouble[0]
    assert watched.scan() == (edition, ())


def test_what_could_not_be_copied_is_tried_again(watched: Watched, root: Path, tmp_path: Path) -> None:
    lay("many", root)
    (tmp_path / "spool").write_text("in the way")
    edition, trouble = watched.scan()
    assert edition.sets == () and len(trouble) == 1
    (tmp_path / "spool").unlink()
    assert labels(watched.scan()[0]) == ["ckpt-7"]


def test_an_older_one_is_taken_where_none_was_copied(watched: Watched, root: Path) -> None:
    lay("many", root)
    tear(lay("many", root, rename=("-7", "-8"), at_s=2_000)[0])
    assert labels(watched.scan()[0]) == ["ckpt-7"]


def test_deleting_is_not_followed(watched: Watched, root: Path) -> None:
    lay("backup", root)
    before, _ = watched.scan()
    shutil.rmtree(root)
    assert watched.scan()[0] == before


def test_the_state_file_may_come_later(watched: Watched, root: Path) -> None:
    state = next(path for path in lay("managed", root) if path.name == "checkpoint")
    said = state.read_bytes()
    state.unlink()
    before, _ = watched.scan()
    state.write_bytes(said)
    after, _ = watched.scan()
    assert [each.found.is_named for each in (*before.sets, *after.sets)] == [False, True]
    assert after.number == before.number + 1 and after.sets[0].place == before.sets[0].place


def test_what_a_script_wrote_and_died_before_naming_is_the_newest(watched: Watched, root: Path) -> None:
    lay("managed", root)
    watched.scan()
    lay_again(root, "ckpt-2", "ckpt-3", at_s=5_000)
    edition, trouble = watched.scan()
    assert (labels(edition), edition.sets[0].found.is_named, trouble) == (["ckpt-3"], True, ())
    assert 'model_checkpoint_path: "ckpt-3"' in (edition.sets[0].place / "checkpoint").read_text()
    state = root / "checkpoint"
    state.write_text(state.read_text().replace("ckpt-2", "ckpt-3"))  # it lives, and says so a moment later
    assert watched.scan()[0] == edition


@pytest.mark.parametrize(("was_there", "at_s"), [(True, 5_000), (False, 5)])
def test_what_an_earlier_training_left_is_none_the_newer_for_its_step(
    watched: Watched, root: Path, was_there: bool, at_s: int
) -> None:
    lay("managed", root)
    if not was_there:
        watched.scan()
    lay_again(root, "ckpt-2", "ckpt-900", at_s)
    assert labels(watched.scan()[0]) == ["ckpt-2"]


def test_what_could_not_be_read_at_first_may_be_of_an_earlier_training(
    watched: Watched, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay("managed", root)
    lay_again(root, "ckpt-2", "ckpt-900", at_s=5_000)
    with monkeypatch.context() as patch:
        patch.setattr("keepstep.checkpoint.files.contents.LISTED_MAX", 1)
        assert labels(watched.scan()[0]) == []
    assert labels(watched.scan()[0]) == ["ckpt-2"]


def test_what_is_not_the_scripts_is_passed_over(root: Path, tmp_path: Path) -> None:
    lay("many", root / "store" / "job")
    lay("many", root / ".hidden")
    lay("many", root / "ckpt-9_temp", rename=("ckpt-7", "part-00000-of-00001"))
    (root / "link").symlink_to(root / "store")
    assert Watched(root, tmp_path / "spool", 0, frozenset([root / "store"])).scan() == (Edition(0, ()), ())


def test_writers_without_number_are_bounded(watched: Watched, root: Path) -> None:
    for number in range(WRITERS_MAX + 4):
        lay("h5/v3.h5", root, rename=("v3", f"run{chr(97 + number)}"), at_s=1_000 + number)
    edition, _ = watched.scan()
    assert len(edition.sets) == WRITERS_MAX
    copies = watched._copies
    assert watched.scan()[0] == edition
    assert watched._copies == copies, "those that are left out are not copied at each look"
    assert labels(edition)[-1] == f"run{chr(97 + WRITERS_MAX + 3)}.h5"


def test_what_an_older_uploader_left_is_taken_away(tmp_path: Path, root: Path) -> None:
    lay("many", tmp_path / "spool" / "3")
    Watched(root, tmp_path / "spool").scan()
    assert not (tmp_path / "spool").exists()


def test_what_was_changed_for_the_script_is_found(watched: Watched, root: Path) -> None:
    lay("many", root)
    lay("many", root, rename=("-7", "-8"), at_s=2_000)
    before, _ = watched.scan()
    watched.change(lambda tree: [path.unlink() for path in tree.root.glob("ckpt-8*")])
    after, _ = watched.scan()
    assert (labels(before), labels(after)) == (["ckpt-8"], ["ckpt-7"]) and after.number == before.number + 1


def test_what_is_known_is_passed_over_until_it_changes(watched: Watched, root: Path) -> None:
    lay("many", root)
    lay("backup", root / "b")
    watched.pass_over(lambda folder, found: folder == "b")
    assert labels(watched.scan()[0]) == ["ckpt-7"]
    lay("backup", root / "b", at_s=2_000)
    assert labels(watched.scan()[0]) == ["ckpt-7", "b/latest.weights.h5"]


def test_what_was_moved_aside_is_in_no_edition_any_more(watched: Watched, root: Path) -> None:
    """All hosts go on from an older set: the newer one, copied and not committed, must never be."""
    lay("many", root)
    newer = lay("many", root, rename=("-7", "-8"), at_s=2_000)
    assert labels(watched.scan()[0]) == ["ckpt-8"]
    watched.change(lambda tree: [path.unlink() for path in newer])
    watched.pass_over(lambda folder, found: found.name == "ckpt-7")
    assert labels(watched.scan()[0]) == []
    with watched.reading() as edition:
        assert edition.sets == ()


def test_folders_that_only_end_like_those_of_a_save_are_the_scripts(watched: Watched, root: Path) -> None:
    lay("many", root / "room_temp")
    (root / "empty_temp").mkdir()
    assert labels(watched.scan()[0]) == ["room_temp/ckpt-7"]


def test_what_can_not_be_opened_is_looked_at_again(
    watched: Watched, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay("many", root)

    def denied(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr("keepstep.checkpoint.files.writers.os.open", denied)
        edition, trouble = watched.scan()
        assert edition.sets == () and "Permission denied" in trouble[0]
    assert labels(watched.scan()[0]) == ["ckpt-7"]
