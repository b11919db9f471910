"""What the first version of the formats left in a store is read, restored and gone on from by this one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from keepstep.adapters.store_directory import DirectoryStore
from keepstep.checkpoint import catalogue, reading, tables
from keepstep.checkpoint.commit import commit, newest_checkpoint, read_head, read_manifest
from keepstep.checkpoint.files.watched import Tree
from keepstep.checkpoint.filing.keeping import newest_files
from keepstep.checkpoint.filing.put_back import put_back
from keepstep.checkpoint.keys import ManifestName
from keepstep.checkpoint.reading import StoredSlab
from tests.support.script_files import GOLDEN, contents
from tests.support.stores import fetched, rank_slab, stored_checkpoint

STORE = Path(__file__).with_name("golden") / "store-v1"


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    """A copy that may be written to."""
    shutil.copytree(STORE, tmp_path / "store")
    return DirectoryStore(tmp_path / "store")


def test_every_checkpoint_is_listed_and_sound(store):
    assert catalogue.jobs(store) == ("job",)
    listed = catalogue.checkpoints(store, "job")
    assert [(each.name.step, each.name.generation, each.is_newest) for each in listed] == [
        (20, 2, True),
        (10, 1, False),
    ]
    for each in listed:
        assert each.manifest is not None and each.manifest.world_size == 2
        assert reading.verify(store, each.manifest, lambda size: None) == []


@pytest.mark.parametrize("step", [10, 20])
@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_has_its_state_back(store, step, rank):
    (found,) = [each.manifest for each in catalogue.checkpoints(store, "job") if each.name.step == step]
    assert fetched(store, found, rank)[1] == rank_slab(rank, step)


def test_tables_of_tensors_are_read(store):
    """They tell which tensor it was: of two ranks that hold the same they name none, whatever the digests say."""
    name = ManifestName(2, 20, "run")
    assert tables.read_table(store, "job", name, 1) == {"local/moments": "953e4590", "replicated/w": "878719a7"}
    assert tables.differing(store, "job", name, ("crc32c:00000000", "crc32c:878719a7")) == ()
    slab = StoredSlab(store, read_manifest(store, "job", "job/manifests/2-20-run.json"), 0)
    assert [tensor.key for tensor in slab.tensors] == ["replicated/w", "local/moments"]


def test_a_new_generation_goes_on_from_it(store):
    head, unreadable = newest_checkpoint(store, "job", frozenset())
    assert head is not None and (head.generation, head.step, unreadable) == (2, 20, ())
    manifest = stored_checkpoint(store, ManifestName(3, 30, "run"))
    commit(store, manifest)
    head = read_head(store, "job").head
    assert head is not None and (head.generation, head.step) == (3, 30)


def test_the_script_s_own_files_are_put_back(store, tmp_path):
    newest = newest_files(store, "job")
    assert newest is not None and [each.label for each in newest.sets] == ["ckpt-2"]
    put_back(store, newest, Tree(tmp_path / "back"), own=False)
    found = contents(tmp_path / "back")
    written = contents(GOLDEN / "managed")
    for name in ("ckpt-2.index", "ckpt-2.data-00000-of-00001"):
        assert found[name] == written[name]
