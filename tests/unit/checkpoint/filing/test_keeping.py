"""Editions are committed as one, uploaded once, fenced, and swept without harm to what is kept."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keepstep.checkpoint.commit import Fenced, claim, read_head
from keepstep.checkpoint.files.watched import Edition, Watched
from keepstep.checkpoint.filing.keeping import Kept, keep, newest_files, sweep_files
from keepstep.checkpoint.filing.manifest import parse_files_manifest, read_files_manifest
from keepstep.checkpoint.keys import files_line, objects_prefix
from keepstep.checkpoint.retention import Retention
from keepstep.checkpoint.strict_json import MalformedDocument, write_canonical
from tests.support.script_files import lay
from tests.support.stores import memory_store


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def watched(tmp_path: Path, root: Path) -> Watched:
    return Watched(root, tmp_path / "spool")


def kept(store, edition: Edition, generation: int = 1, run: str = "r") -> Kept:
    return keep(store, "job", edition, generation, run, 99)


def names(manifest) -> list[str]:
    return [each.label for each in manifest.sets]


def test_what_is_kept_is_what_the_script_wrote(watched: Watched, root: Path) -> None:
    lay("managed", root)
    lay("backup", root / "b")
    store = memory_store()
    done = kept(store, watched.scan()[0])
    assert newest_files(store, "job") == done.manifest
    assert names(done.manifest) == ["ckpt-2", "b/latest.weights.h5"]
    assert done.uploaded_bytes == done.manifest.size_bytes
    for each in done.manifest.sets:
        for file in each.files:
            written = root / each.folder / file.name
            assert b"".join(store.get(file.key)) == written.read_bytes()
            assert file.mtime_ns == written.stat().st_mtime_ns


def test_nothing_is_nothing_new(watched: Watched, root: Path) -> None:
    store = memory_store()
    assert kept(store, watched.scan()[0]) == Kept(None, 0)
    lay("many", root)
    first = kept(store, watched.scan()[0])
    assert kept(store, Edition(9, ())) == Kept(first.manifest, 0)


def test_only_what_changed_is_uploaded(watched: Watched, root: Path) -> None:
    lay("many", root)
    lay("backup", root)
    store = memory_store()
    first = kept(store, watched.scan()[0])
    lay("many", root, rename=("-7", "-8"), at_s=2_000)
    second = kept(store, watched.scan()[0])
    assert names(second.manifest) == ["latest.weights.h5", "ckpt-8"]
    assert second.uploaded_bytes == sum(file.size_bytes for file in second.manifest.sets[1].files)
    assert second.manifest.sets[0] == first.manifest.sets[0]
    assert second.manifest.step == first.manifest.step + 1


def write_over(root: Path) -> None:
    """As a script does that copies a file onto one that is there: the copies aside are links to it."""
    path = next(root.glob("ckpt-*.data-*"))
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, (9_000, 9_000))


def test_what_is_written_over_in_place_is_not_committed(watched: Watched, root: Path) -> None:
    lay("many", root)
    lay("backup", root / "b")
    store, (edition, _) = memory_store(), watched.scan()
    write_over(root)
    assert names(kept(store, edition).manifest) == ["b/latest.weights.h5"]
    lay("many", root, at_s=3_000)
    assert names(kept(store, watched.scan()[0]).manifest) == ["ckpt-7", "b/latest.weights.h5"]


def test_what_is_written_over_while_it_is_uploaded_is_not_committed(watched: Watched, root: Path) -> None:
    lay("many", root)
    store, (edition, _) = memory_store(), watched.scan()
    before, put = kept(store, edition).manifest, store.put
    lay("many", root, rename=("-7", "-8"), at_s=2_000)
    (root / "ckpt-7.data-00000-of-00001").unlink()
    edition, _ = watched.scan()

    def written_over(key: str, *words: Any, **more: Any) -> Any:
        write_over(root)
        return put(key, *words, **more)

    store.put = written_over
    assert kept(store, edition) == Kept(before, 0)


def test_a_time_before_1970_is_none(watched: Watched, root: Path) -> None:
    (path,) = lay("h5/v3.h5", root)
    os.utime(path, ns=(-(10**9), -(10**9)))
    store = memory_store()
    done = kept(store, watched.scan()[0])
    assert newest_files(store, "job") == done.manifest
    assert done.manifest.sets[0].files[0].mtime_ns == 0


def test_the_same_again_is_left_at_that(watched: Watched, root: Path) -> None:
    lay("many", root)
    store = memory_store()
    edition, _ = watched.scan()
    assert kept(store, edition).manifest == kept(store, edition).manifest
    assert kept(store, edition, generation=2).uploaded_bytes == 0


def test_what_other_writers_had_stays(watched: Watched, root: Path, tmp_path: Path) -> None:
    """An uploader that was started anew knows of what changed since, and of nothing else."""
    lay("many", root)
    lay("backup", root)
    store = memory_store()
    first = kept(store, watched.scan()[0])
    again = Watched(root, tmp_path / "another", 9)
    again.pass_over(first.manifest.has)
    lay("many", root, rename=("-7", "-8"), at_s=2_000)
    edition, _ = again.scan()
    assert [each.found.name for each in edition.sets] == ["ckpt-8"]
    assert names(kept(store, edition).manifest) == ["latest.weights.h5", "ckpt-8"]


def test_a_stale_generation_keeps_nothing(watched: Watched, root: Path) -> None:
    lay("many", root)
    store = memory_store()
    edition, _ = watched.scan()
    first = kept(store, edition)
    claim(store, files_line("job"), 3, "r")
    with pytest.raises(Fenced, match="generation 3"):
        kept(store, edition, generation=2)
    lay("many", root, rename=("-7", "-8"), at_s=2_000)
    with pytest.raises(Fenced, match="generation 3"):
        kept(store, watched.scan()[0], generation=2)
    assert newest_files(store, "job") == first.manifest


def test_a_commit_without_head_does_not_spoil_the_next_one(watched: Watched, root: Path) -> None:
    """As where the uploader was killed between manifest and HEAD."""
    lay("many", root)
    store = memory_store()
    kept(store, watched.scan()[0])
    head = read_head(store, "job/files")
    lay("many", root, rename=("-7", "-8"), at_s=2_000)
    lost = kept(store, watched.scan()[0])
    store.put("job/files/HEAD.json", head.head.to_bytes())
    lay("many", root, rename=("-7", "-9"), at_s=3_000)
    last = kept(store, watched.scan()[0])
    assert (lost.manifest.step, last.manifest.step) == (2, 3)
    for manifest in (lost.manifest, last.manifest):
        for file in manifest.files():
            assert len(b"".join(store.get(file.key))) == file.size_bytes


def test_the_next_older_one_is_found(watched: Watched, root: Path) -> None:
    lay("many", root)
    store = memory_store()
    first = kept(store, watched.scan()[0])
    lay("many", root, rename=("-7", "-8"), at_s=2_000)
    second = kept(store, watched.scan()[0])
    assert newest_files(store, "job", frozenset([second.manifest.key])) == first.manifest
    store.put(second.manifest.key, b"{}")
    assert newest_files(store, "job") == first.manifest
    assert newest_files(store, "job", frozenset([first.manifest.key])) is None


def test_sweeping_leaves_what_is_named(watched: Watched, root: Path) -> None:
    lay("backup", root)
    store = memory_store()
    manifests = []
    for number in range(4):
        lay("many", root, rename=("-7", f"-{number + 10}"), at_s=2_000 + 10 * number)
        manifests.append(kept(store, watched.scan()[0]).manifest)
    store.put(f"{objects_prefix('job/files')}g1/s1/0123456789abcdef/0-left.keras", b"x")
    swept = sweep_files(store, "job", 9, Retention(2), now_unix=1e12)
    assert (swept.manifests, swept.objects) == (2, 5)
    assert sweep_files(store, "job", 9, Retention(2), now_unix=1e12).objects == 0
    left = set(store.list(objects_prefix("job/files")))
    assert left == {file.key for manifest in manifests[2:] for file in manifest.files()}


def test_a_stale_generation_sweeps_nothing(watched: Watched, root: Path) -> None:
    lay("many", root)
    store = memory_store()
    kept(store, watched.scan()[0])
    lay("many", root, rename=("-7", "-8"), at_s=2_000)
    kept(store, watched.scan()[0])
    before = set(store.list(""))
    with pytest.raises(Fenced, match="generation 1, this is 0"):
        sweep_files(store, "job", 0, Retention(1), now_unix=1e12)
    assert set(store.list("")) == before


def test_young_garbage_may_be_an_upload_under_way(watched: Watched, root: Path) -> None:
    lay("many", root)
    store = memory_store()
    kept(store, watched.scan()[0])
    store.put(f"{objects_prefix('job/files')}g1/s1/0123456789abcdef/0-new.keras", b"x")
    assert sweep_files(store, "job", 9, Retention(1), now_unix=0.0).objects == 0


def test_a_manifest_that_can_not_be_read_keeps_all_objects(watched: Watched, root: Path) -> None:
    lay("many", root)
    store = memory_store()
    kept(store, watched.scan()[0])
    store.put("job/files/manifests/1-9-r.json", b"{}")
    before = set(store.list(""))
    with pytest.raises(MalformedDocument, match="1-9-r"):
        sweep_files(store, "job", 9, Retention(1), now_unix=1e12)
    assert set(store.list("")) == before


@pytest.fixture
def document(watched: Watched, root: Path):
    lay("backup", root / "b")
    return kept(memory_store(), watched.scan()[0]).manifest


def test_a_manifest_reads_back(document) -> None:
    assert parse_files_manifest(document.to_bytes()) == document
    store = memory_store()
    store.put(document.key, document.to_bytes())
    assert read_files_manifest(store, document.job, document.key) == document
    other = replace(document, step=2)
    store.put(other.key, document.to_bytes())
    with pytest.raises(MalformedDocument, match="holds the manifest"):
        read_files_manifest(store, document.job, other.key)


@pytest.mark.parametrize(
    "change",
    [
        {"folder": "../outside"}, {"folder": "/etc"}, {"folder": "a//b"}, {"folder": "a/"}, {"folder": "./a"},
        {"folder": "a\0"}, {"kind": "zip"}, {"files": ()},
    ],
)  # fmt: skip
def test_a_manifest_that_leads_astray_is_refused(document, change) -> None:
    wrong = replace(document, sets=(replace(document.sets[0], **change),))
    with pytest.raises(MalformedDocument):
        parse_files_manifest(wrong.to_bytes())


@pytest.mark.parametrize(
    "change",
    [
        {"name": ".."}, {"name": "a/b"}, {"name": ""}, {"name": "a\0"}, {"crc32c": "XYZ"}, {"size_bytes": -1},
        {"key": "job/objects/g1/s1/local-0.r"}, {"key": "other/files/objects/g1/s1/00000000/0-a"},
    ],
)  # fmt: skip
def test_a_file_that_leads_astray_is_refused(document, change) -> None:
    first = document.sets[0]
    wrong = replace(document, sets=(replace(first, files=(replace(first.files[0], **change), *first.files[1:])),))
    with pytest.raises(MalformedDocument):
        parse_files_manifest(wrong.to_bytes())


def test_other_bytes_are_no_manifest(document) -> None:
    data = document.to_bytes()
    for wrong in (b"", b"{}", data[:-1], data.replace(b'"version":1', b'"version":2'), data.replace(b"99", b"98")):
        with pytest.raises(MalformedDocument):
            parse_files_manifest(wrong)
    with pytest.raises(MalformedDocument):
        parse_files_manifest(replace(document, sets=()).to_bytes())
    twice = replace(document, sets=document.sets * 2)
    with pytest.raises(MalformedDocument, match="twice"):
        parse_files_manifest(twice.to_bytes())
    assert write_canonical({"version": 1}) != data
