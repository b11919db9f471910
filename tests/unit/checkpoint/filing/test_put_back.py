"""A folder that is put right holds what was committed and nothing newer or torn, whenever the work was broken off."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from keepstep.checkpoint.files.contents import read_sets, read_state
from keepstep.checkpoint.files.state_file import NamedCheckpoints
from keepstep.checkpoint.files.watched import Tree, Watched
from keepstep.checkpoint.filing import put_back as module
from keepstep.checkpoint.filing.keeping import keep
from keepstep.checkpoint.filing.manifest import FilesManifest
from keepstep.checkpoint.filing.put_back import ASIDE, PutBack, is_right, put_back
from keepstep.checkpoint.restore import CorruptObject
from tests.support.script_files import contents, lay, lay_again, tear
from tests.support.stores import memory_store


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def store():
    return memory_store()


def committed(store, root: Path, tmp_path: Path) -> FilesManifest:
    edition, trouble = Watched(root, tmp_path / "spool").scan()
    assert trouble == ()
    return keep(store, "job", edition, 1, "r", 99).manifest


def seen(folder: Path) -> dict[str, bytes]:
    """What the script sees."""
    return {name: data for name, data in contents(folder).items() if not name.startswith(ASIDE)}


def back(store, manifest: FilesManifest | None, root: Path, own: bool = False) -> PutBack:
    return put_back(store, manifest, Tree(root), own=own)


def test_an_empty_folder_gets_all_of_it(store, root: Path, tmp_path: Path) -> None:
    lay("managed", root)
    lay("keras", root / "best")
    lay("backup", root / "b")
    manifest, before = committed(store, root, tmp_path), seen(root)
    times = {name: (root / name).stat().st_mtime_ns for name in before}
    shutil.rmtree(root)
    done = back(store, manifest, root)
    assert sorted(done.brought) == sorted(each.label for each in manifest.sets) and done.aside == []
    after = seen(root)
    assert after.keys() == {name for name in before if "ckpt-1" not in name}
    assert read_state(root) == NamedCheckpoints("ckpt-2", frozenset({"ckpt-2"}))
    for name in after.keys() - {"checkpoint"}:
        assert after[name] == before[name]
        assert (root / name).stat().st_mtime_ns == times[name]


@pytest.mark.parametrize("own", [False, True])
def test_what_is_there_stays(store, root: Path, tmp_path: Path, own: bool) -> None:
    lay("managed", root)
    lay("backup", root / "b")
    (root / "notes.txt").write_text("mine")
    manifest, before = committed(store, root, tmp_path), contents(root)
    assert back(store, manifest, root, own) == PutBack()
    assert contents(root) == before


def test_all_hosts_go_on_from_the_same(store, root: Path, tmp_path: Path) -> None:
    lay("many", root)
    manifest, before = committed(store, root, tmp_path), seen(root)
    lay("many", root, rename=("-7", "-8"), at_s=2_000)
    done = back(store, manifest, root)
    assert done.brought == [] and len(done.aside) == 2
    assert seen(root) == before
    assert len(contents(root / ASIDE)) == 2


@pytest.mark.parametrize("own", [False, True])
def test_a_set_whose_writer_died_before_naming_it_is_one_for_all(store, root: Path, tmp_path: Path, own: bool) -> None:
    """A script that goes by names and one that goes by the `checkpoint` file go on from the same."""
    lay("managed", root)
    watched = Watched(root, tmp_path / "spool")
    manifest, before = keep(store, "job", watched.scan()[0], 1, "r", 99).manifest, seen(root)
    lay_again(root, "ckpt-2", "ckpt-3", at_s=5_000)
    done = watched.change(lambda tree: put_back(store, manifest, tree, own=own))
    newest = "ckpt-3" if own else "ckpt-2"
    assert done.brought == [] and len(done.aside) == (0 if own else 2)
    assert read_state(root).latest == newest and read_sets(root)[-1].name == newest
    assert own or seen(root) == before


@pytest.mark.parametrize("own", [False, True])
def test_what_an_earlier_training_left_stays(store, root: Path, tmp_path: Path, own: bool) -> None:
    lay("managed", root)
    lay_again(root, "ckpt-2", "ckpt-900", at_s=5_000)
    watched = Watched(root, tmp_path / "spool")
    manifest, before = keep(store, "job", watched.scan()[0], 1, "r", 99).manifest, seen(root)
    assert watched.change(lambda tree: put_back(store, manifest, tree, own=own)) == PutBack()
    assert seen(root) == before


def test_a_lone_host_may_be_ahead_of_the_store(store, root: Path, tmp_path: Path) -> None:
    lay("many", root)
    manifest = committed(store, root, tmp_path)
    lay("many", root, rename=("-7", "-8"), at_s=2_000)
    before = seen(root)
    assert back(store, manifest, root, own=True) == PutBack()
    assert seen(root) == before


@pytest.mark.parametrize("own", [False, True])
def test_what_is_torn_goes_aside(store, root: Path, tmp_path: Path, own: bool) -> None:
    lay("managed", root)
    manifest, before = committed(store, root, tmp_path), seen(root)
    tear(lay("many", root, rename=("-7", "-3"), at_s=2_000)[0])
    lay("many", root / "ckpt-4_temp", rename=("ckpt-7", "part-00000-of-00001"))
    lay("many/ckpt-7.index", root, rename=("-7", "-5"))
    (root / "checkpoint.tmp0123456789abcdef0123456789abcdef").write_bytes(b"")
    done = back(store, manifest, root, own)
    assert seen(root) == before
    assert {name.partition(".")[0] for name in done.aside} == {"ckpt-3", "ckpt-4_temp", "ckpt-5", "checkpoint"}


@pytest.mark.parametrize("own", [False, True])
def test_what_was_torn_in_place_is_brought(store, root: Path, tmp_path: Path, own: bool) -> None:
    weights = lay("backup", root)[0]
    manifest, before = committed(store, root, tmp_path), seen(root)
    tear(weights)
    assert back(store, manifest, root, own).brought == ["latest.weights.h5"]
    assert seen(root) == before


def test_other_content_under_the_same_name_is_replaced(store, root: Path, tmp_path: Path) -> None:
    lay("h5/v3.h5", root, rename=("v3", "model"))
    manifest, before = committed(store, root, tmp_path), seen(root)
    lay("h5/v2.h5", root, rename=("v2", "model"), at_s=2_000)
    assert back(store, manifest, root, own=True) == PutBack()
    assert back(store, manifest, root).brought == ["model.h5"]
    assert seen(root) == before


def test_the_state_file_names_what_there_is(store, root: Path, tmp_path: Path) -> None:
    lay("managed", root)
    manifest = committed(store, root, tmp_path)
    for path in root.glob("ckpt-2*"):
        path.unlink()
    assert back(store, manifest, root).brought == ["ckpt-2"]
    assert read_state(root) == NamedCheckpoints("ckpt-2", frozenset({"ckpt-1", "ckpt-2"}))
    tear(next(root.glob("ckpt-2.data*")))
    assert back(store, None, root, own=True).brought == []
    assert read_state(root).latest == "ckpt-1"
    assert [each.name for each in read_sets(root)] == ["ckpt-1"]


def test_without_a_manifest_whole_files_stay(store, root: Path) -> None:
    lay("managed", root)
    lay("keras", root)
    before = contents(root)
    assert back(store, None, root, own=True) == PutBack()
    assert contents(root) == before


def test_other_writers_are_left_alone(store, root: Path, tmp_path: Path) -> None:
    lay("many", root)
    manifest = committed(store, root, tmp_path)
    lay("keras", root, at_s=5_000)
    before = contents(root)
    assert back(store, manifest, root) == PutBack()
    assert contents(root) == before


def test_a_folder_that_was_downloaded_again_has_new_times(store, root: Path, tmp_path: Path) -> None:
    lay("many", root)
    lay("many", root, rename=("-7", "-8"), at_s=2_000)
    manifest, before = committed(store, root, tmp_path), seen(root)
    for path in sorted(root.iterdir(), reverse=True):
        shutil.copyfile(path, root / "copy")
        (root / "copy").replace(path)
    assert back(store, manifest, root) == PutBack()
    assert seen(root) == before


def test_corrupt_objects_leave_the_folder_as_it_was(store, root: Path, tmp_path: Path) -> None:
    lay("many", root)
    lay("backup", root)
    manifest = committed(store, root, tmp_path)
    last = list(manifest.files())[-1]
    store.put(last.key, b"x" * last.size_bytes)
    for path in root.iterdir():
        tear(path)
    before = contents(root)
    with pytest.raises(CorruptObject):
        back(store, manifest, root)
    assert contents(root) == before


def test_killed_at_any_moment_it_is_put_right(store, root: Path, tmp_path: Path, monkeypatch) -> None:
    lay("managed", root)
    lay("backup", root / "b")
    manifest = committed(store, root, tmp_path)
    tear(root / "b" / "latest.weights.h5")
    tear(next(root.glob("ckpt-2.data*")))
    lay("many", root, at_s=9_000)
    start = tmp_path / "start"
    shutil.copytree(root, start)

    class Killed(BaseException):
        pass

    whole, moment = None, 0
    while True:
        shutil.rmtree(root)
        shutil.copytree(start, root)
        steps = [moment]

        def dying(call, steps=steps):
            def do(*arguments, **options):
                if not steps[0]:
                    raise Killed
                steps[0] -= 1
                return call(*arguments, **options)

            return do

        with monkeypatch.context() as patched:
            for name in ("replace", "open", "pwrite", "fsync", "utime"):
                patched.setattr(module.os, name, dying(getattr(module.os, name)))
            # what is killed takes nothing back
            patched.setattr(module.contextlib.ExitStack, "callback", lambda self, call, **options: None)
            try:
                back(store, manifest, root)
            except Killed:
                pass
            else:
                whole = seen(root)
        if whole is not None:
            break
        back(store, manifest, root)
        after, sets = seen(root), {each.name for each in read_sets(root)}
        assert not [name for name in after if ".keepstep-" in name]
        assert sets == {"ckpt-1", "ckpt-2"}
        for each in manifest.sets:
            for file in each.files:
                assert len(after[f"{each.folder}/{file.name}".lstrip("/")]) == file.size_bytes
        moment += 1
    assert moment > 20
    assert whole.keys() == {name for name in contents(start) if "ckpt-7" not in name}


def test_a_lone_file_that_nobody_knows_is_left_alone(store, root: Path, tmp_path: Path) -> None:
    lay("many", root)
    manifest = committed(store, root, tmp_path)
    (root / "dataset.h5").write_bytes(b"not what it says, but somebody's")
    for own in (False, True):
        assert back(store, manifest, root, own) == PutBack()
        assert back(None, None, root, own=True) == PutBack()


def test_whether_there_is_anything_to_put_right(store, root: Path) -> None:
    assert not is_right(Tree(root))
    lay("managed", root)
    assert is_right(Tree(root))
    tear(next(root.glob("ckpt-2.data*")))
    assert not is_right(Tree(root))
    back(None, None, root, own=True)
    assert is_right(Tree(root))


@pytest.mark.parametrize("own", [False, True])
def test_what_is_only_called_so_is_the_scripts_and_stays(store, root: Path, tmp_path: Path, own: bool) -> None:
    lay("managed", root)
    manifest = committed(store, root, tmp_path)
    lay("h5/v3.h5", root / "room_temp")
    (root / "empty_temp").mkdir()
    (root / "max_temp").write_bytes(b"37")
    (root / "vectors.index").write_bytes(b"somebody's search index, which is no table of TensorFlow's")
    before = contents(root)
    for _ in range(2):
        assert back(store, manifest, root, own) == PutBack()
    assert contents(root) == before and (root / "empty_temp").is_dir()


def test_a_folder_called_checkpoint_is_in_nobodys_way(store, root: Path, tmp_path: Path) -> None:
    lay("many", root)
    (root / "checkpoint").unlink(missing_ok=True)
    lay("h5/v3.h5", root / "checkpoint")
    manifest, before = committed(store, root, tmp_path), seen(root)
    for path in root.glob("ckpt-*"):
        path.unlink()
    assert len(back(store, manifest, root).brought) == 1
    assert seen(root) == before


def test_the_longest_name_comes_back(store, root: Path, tmp_path: Path) -> None:
    name = "x" * (255 - len(".h5"))
    lay("h5/v3.h5", root, rename=("v3", name))
    manifest, before = committed(store, root, tmp_path), seen(root)
    shutil.rmtree(root)
    back(store, manifest, root)
    assert seen(root) == before == {f"{name}.h5": before[f"{name}.h5"]}
