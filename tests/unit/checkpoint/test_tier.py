"""Copies on a disk of the host's own: read where they are right, and never missed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keepstep.checkpoint.commit import commit
from keepstep.checkpoint.keys import ManifestName
from keepstep.checkpoint.manifest import Manifest
from keepstep.checkpoint.tier import KEPT, TieredStore
from keepstep.ports.store import Body
from tests.support.fake_agent import eventually
from tests.support.stores import TroubledStore, fetched, memory_store, rank_slab, stored_checkpoint


class Counting(TroubledStore):
    """Counts what is read from afar."""

    def __init__(self, inner):
        self.got: list[str] = []
        super().__init__(inner)

    def get(self, key: str, start: int = 0, size: int | None = None) -> Iterator[bytes]:
        self.got.append(key)
        return super().get(key, start, size)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "nvme" / "keepstep"


def committed(folder: Path, steps=(10,)) -> tuple[Counting, TieredStore, list[Manifest]]:
    afar = Counting(memory_store())
    tiered = TieredStore(afar, folder, "job")
    manifests = []
    for step in steps:
        manifests.append(stored_checkpoint(tiered, ManifestName(1, step, "r")))
        commit(tiered, manifests[-1])
    return afar, tiered, manifests


def restored(store, manifest: Manifest, rank: int = 0) -> bytes:
    return fetched(store, manifest, rank)[1]


def copies(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_what_was_written_here_is_read_from_here(folder):
    afar, tiered, (manifest,) = committed(folder)
    assert [restored(tiered, manifest, rank) for rank in (0, 1)] == [rank_slab(rank, 10) for rank in (0, 1)]
    assert afar.got == []


def test_the_copy_is_made_while_the_object_is_on_its_way(folder):
    class Slow(TroubledStore):
        """Takes nothing before the copy is there."""

        def put(self, key: str, body: Body, **options: Any) -> str:
            if "/tensors-" not in key:
                eventually(lambda: list(folder.glob(f"{key}.????????")))
            return super().put(key, body, **options)

    stored_checkpoint(TieredStore(Slow(memory_store()), folder, "job"), ManifestName(1, 10, "r"))
    assert len(copies(folder)) == 2 * 2  # of each rank a share, and what is local


def test_another_process_finds_it(folder):
    afar, _, (manifest,) = committed(folder)
    again = TieredStore(afar, folder, "job")
    assert restored(again, manifest) == rank_slab(0, 10)
    assert afar.got == []


@pytest.mark.parametrize("spoil", [
    lambda path: path.write_bytes(path.read_bytes()[:-1]),
    lambda path: path.write_bytes(b"\x01" + path.read_bytes()[1:]),
    lambda path: path.write_bytes(b""),
    lambda path: path.unlink(),
], ids=["short", "flipped", "empty", "gone"])  # fmt: skip
@pytest.mark.parametrize("when", ["before", "after a reading"])
def test_a_copy_that_is_wrong_is_not_read(folder, spoil, when):
    afar, tiered, (manifest,) = committed(folder)
    if when == "after a reading":
        restored(tiered, manifest)
    for path in copies(folder):
        spoil(path)
    assert [restored(tiered, manifest, rank) for rank in (0, 1)] == [rank_slab(rank, 10) for rank in (0, 1)]
    assert afar.got
    assert copies(folder) == []


def test_ranges_are_read_from_a_copy(folder):
    afar, tiered, (manifest,) = committed(folder)
    share = manifest.replicated()[0]
    whole = b"".join(tiered.get(share.key))
    assert b"".join(tiered.get(share.key, 10, 20)) == whole[10:30]
    assert b"".join(tiered.get(share.key, len(whole) - 5, 20)) == whole[-5:]
    assert b"".join(tiered.get(share.key, 5)) == whole[5:]
    assert afar.got == []


def test_only_the_newest_stay(folder):
    committed(folder, steps=(10, 20, 30, 40))
    assert {path.parent.name for path in copies(folder)} == {f"s{step}" for step in (10, 20, 30, 40)[-KEPT:]}


def test_a_disk_that_takes_nothing_stops_nothing(tmp_path):
    no_folder = tmp_path / "file"
    no_folder.write_text("in the way")
    afar, tiered, (manifest,) = committed(no_folder / "keepstep")
    assert restored(tiered, manifest) == rank_slab(0, 10)
    assert afar.got


def test_only_objects_of_checkpoints_are_copied(folder):
    _, tiered, _ = committed(folder)
    tiered.put("job/trust/authority.json", b"a key", crc32c=None)
    assert {path.name.partition("-")[0] for path in copies(folder)} == {"local", "replicated", "tensors"} - {"tensors"}


def test_what_was_not_written_here_is_read_from_afar(folder, tmp_path):
    afar, _, (manifest,) = committed(folder)
    elsewhere = TieredStore(afar, tmp_path / "another", "job")
    assert restored(elsewhere, manifest) == rank_slab(0, 10)
    assert afar.got
