"""`keepstep checkpoint`: what a store holds, whether it is sound, what changed; and its copying, pruning and export."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keepstep.adapters.clock import unix_time
from keepstep.app import exporting, kept_files
from keepstep.app.picking import STEP, find, open_store
from keepstep.app.showing import cell, counter, date, progress, size, standing, table, told_of_head, told_of_unread
from keepstep.app.told_store import ToldStore
from keepstep.checkpoint import catalogue, reading
from keepstep.checkpoint.catalogue import Listed
from keepstep.checkpoint.commit import Fenced, StaleStep, commit
from keepstep.checkpoint.files.contents import check_set, read_sets
from keepstep.checkpoint.files.sets import FileSet
from keepstep.checkpoint.files.unfit import UnfitFile
from keepstep.checkpoint.files.writers import Writing, writing
from keepstep.checkpoint.filing.keeping import sweep_files
from keepstep.checkpoint.manifest import Manifest
from keepstep.checkpoint.reading import StoredSlab
from keepstep.checkpoint.restore import CorruptObject
from keepstep.checkpoint.retention import Retention, sweep
from keepstep.checkpoint.strict_json import MalformedDocument
from keepstep.core.knobs import parse_encryption
from keepstep.errors import ConfigError, StoreRefusedError
from keepstep.ports.store import ChecksumMismatch, NotFound, ObjectStore, StoreError

Perform = Callable[[ObjectStore, str, argparse.Namespace], int]


def add_commands(commands: Any) -> None:
    """Add `checkpoint` and what stands below it to the parser's commands."""
    parser = commands.add_parser("checkpoint", help="list, verify, compare, copy, prune or export checkpoints")
    below = parser.add_subparsers(required=True, metavar="WHAT")

    def add(name: str, text: str, perform: Perform, of_files: Perform | None = None) -> Any:
        command = below.add_parser(name, help=text, description=text)
        command.add_argument("store", metavar="STORE", help="s3://bucket/prefix or a directory")
        command.add_argument("--job", help="whose (default: the only one in the store)")
        command.add_argument("--endpoint", help="of an S3 that is not Amazon's")
        if of_files is not None:
            command.add_argument("--files", action="store_true", help="of what the script wrote itself")
        command.set_defaults(command=lambda options: _run(of_files if of_files and options.files else perform, options))
        return command

    listing = add("ls", "list the checkpoints of a job, the newest first", _ls, kept_files.ls)
    listing.add_argument("--json", action="store_true")
    showing = add("show", "show a checkpoint's objects and tensors", _show, kept_files.show)
    showing.add_argument("step", nargs="?", default="newest", help=STEP)
    showing.add_argument("--rank", type=int, default=0, help="whose local tensors (default 0)")
    showing.add_argument("--json", action="store_true")
    verifying = add("verify", "read checkpoints back, every byte", _verify, kept_files.verify)
    verifying.add_argument("step", nargs="*", default=["newest"], help=f"{STEP} (default newest), or all")
    comparing = add("diff", "tell which tensors differ between two checkpoints", _diff)
    comparing.add_argument("before", help=STEP)
    comparing.add_argument("after", nargs="?", default="newest", help=STEP)
    comparing.add_argument("--rank", type=int, default=0, help="whose local tensors (default 0)")
    copying = add("copy", "copy checkpoints to another store, where they can be resumed from", _copy, kept_files.copy)
    copying.add_argument("target", metavar="TARGET", help="s3://bucket/prefix or a directory")
    copying.add_argument("step", nargs="?", default="newest", help=f"{STEP} (default newest), or all")
    copying.add_argument("--target-endpoint", help="as --endpoint, of the target")
    text = "who encrypts the copies: bucket (default), kms, or a KMS key's id, ARN or alias"
    copying.add_argument("--encryption", type=_encryption, metavar="KEY", help=text)
    text = "delete all checkpoints but those to keep, and what no checkpoint needs"
    pruning = add("prune", text, _prune, _prune)
    pruning.add_argument("--keep-last", type=int, required=True, metavar="N", help="newest ones to keep, at least 1")
    text = "keep each step (of files: number) that N divides, too"
    pruning.add_argument("--keep-every", type=int, default=0, metavar="N", help=text)
    text = "write a checkpoint as a file of safetensors, Keras or TensorFlow"
    exported = add("export", text, _export, kept_files.export)
    exported.add_argument("step", nargs="?", default="newest", help=STEP)
    exporting.add_arguments(exported)
    text = "list the checkpoints that scripts wrote themselves, and which of them are whole"
    filing = below.add_parser("files", help=text, description=text)
    filing.add_argument("folder", metavar="DIR", type=Path, help="where TensorFlow's or Keras's files lie")
    filing.add_argument("--json", action="store_true")
    filing.set_defaults(command=_files)


def _run(perform: Perform, options: argparse.Namespace) -> int:
    try:
        store = open_store(options.store, options.endpoint, "STORE")
        return perform(store, _job(store, options), options)
    except (StaleStep, MalformedDocument, CorruptObject, ChecksumMismatch, NotFound) as error:
        print(f"keepstep: {options.store}: {error}", file=sys.stderr)
        return 1
    except StoreError as error:
        raise StoreRefusedError(f"{options.store}: {error}") from error


def _encryption(text: str) -> str:
    try:
        return parse_encryption(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"found {text!r}, wanted {error}") from error


def _job(store: ObjectStore, options: argparse.Namespace) -> str:
    found = (options.job,) if options.job else catalogue.jobs(store)
    if len(found) != 1:
        what = f"the jobs {', '.join(found)}" if found else "no job's checkpoints"
        raise ConfigError(f"{options.store} holds {what}", "the name of one", key="--job")
    return str(found[0])


def _find(store: ObjectStore, job: str, wanted: str) -> list[Listed[Manifest]]:
    """The checkpoints that are meant: one, unless all are."""
    return find(catalogue.checkpoints(store, job), job, wanted)


def _one(store: ObjectStore, job: str, wanted: str) -> Manifest:
    (listed,) = _find(store, job, wanted)[:1]
    if listed.manifest is None:
        raise MalformedDocument(f"{listed.label}: {listed.trouble}")
    return listed.manifest


def _slab(store: ObjectStore, manifest: Manifest, rank: int) -> StoredSlab:
    if not 0 <= rank < manifest.world_size:
        raise ConfigError(
            f"found {rank}", f"0 to {manifest.world_size - 1}, the ranks of that checkpoint", key="--rank"
        )
    return StoredSlab(store, manifest, rank)


# --- the commands ----------------------------------------------------------------------------------------------------


def _ls(store: ObjectStore, job: str, options: argparse.Namespace) -> int:
    listed = catalogue.checkpoints(store, job)
    rows = [
        {
            "name": each.label,
            "step": each.name.step,
            "generation": each.name.generation,
            "hosts": each.manifest and each.manifest.world_size,
            "bytes": each.manifest and sum(stored.size_bytes for stored in each.manifest.objects),
            "created": each.manifest and date(each.manifest.created_unix),
            "newest": each.is_newest,
            "trouble": each.trouble,
        }
        for each in listed
    ]
    if options.json:
        print(json.dumps({"job": job, "checkpoints": rows}))
        return 0
    cells = [
        [
            str(row["step"]), str(row["generation"]), cell(row["hosts"]), size(row["bytes"]), cell(row["created"]),
            str(row["name"]), standing(row),
        ]
        for row in rows
    ]  # fmt: skip
    print(table(["step", "generation", "hosts", "size", "created", "name", ""], cells))
    others = len(catalogue.files_checkpoints(store, job))
    if others:
        print(f"and {others} of the script's own files: see --files")
    return 0


def _show(store: ObjectStore, job: str, options: argparse.Namespace) -> int:
    manifest = _one(store, job, options.step)
    slab = _slab(store, manifest, options.rank)
    tensors = [
        {"key": each.key, "dtype": each.dtype, "shape": list(each.shape), "bytes": each.stop - each.start}
        for each in slab.tensors
    ]
    if options.json:
        print(json.dumps({"manifest": json.loads(manifest.to_bytes()), "tensors": tensors}))
        return 0
    print(f"{job}: step {manifest.step} of generation {manifest.generation}, {manifest.world_size} hosts, run ", end="")
    print(f"{manifest.run}, {date(manifest.created_unix)}, {manifest.digest}")
    print(
        table(
            ["object", "size", "crc32c"], [[each.key, size(each.size_bytes), each.crc32c] for each in manifest.objects]
        )
    )
    print()
    shown = [[each.key, reading.describe(each), size(each.stop - each.start)] for each in slab.tensors]
    print(table(["tensor", "type", "size"], shown))
    return 0


def _verify(store: ObjectStore, job: str, options: argparse.Namespace) -> int:
    every = catalogue.checkpoints(store, job)
    listed = {each.label: each for wanted in options.step for each in find(every, job, wanted)}
    bad = told_of_head(catalogue.head_trouble(store, job, every))
    for name, each in listed.items():
        wrong = [each.trouble] if each.manifest is None else []
        if each.manifest is not None:
            with progress(name, sum(stored.size_bytes for stored in each.manifest.objects)) as told:
                wrong = reading.verify(store, each.manifest, told)
        bad += bool(wrong)
        print(f"{name}: {'; '.join(wrong) or 'sound'}")
    return 1 if bad else 0


def _diff(store: ObjectStore, job: str, options: argparse.Namespace) -> int:
    before, after = (_slab(store, _one(store, job, wanted), options.rank) for wanted in (options.before, options.after))
    with progress("reading", sum(each.stop - each.start for slab in (before, after) for each in slab.tensors)) as told:
        found = reading.compare(before, after, told)
    print(
        table(["tensor", "what", "before", "after"], [[each.key, each.what, each.before, each.after] for each in found])
    )
    print(f"{len(found)} of {len({tensor.key for slab in (before, after) for tensor in slab.tensors})} tensors differ")
    return 1 if found else 0


def _copy(store: ObjectStore, job: str, options: argparse.Namespace) -> int:
    target = open_store(options.target, options.target_endpoint, "TARGET", options.encryption)
    newest, unread = None, 0
    for each in reversed(_find(store, job, options.step)):
        if each.manifest is None:
            unread += told_of_unread(each.label, each.trouble)
            continue
        newest = each.manifest
        with progress(each.label, sum(stored.size_bytes for stored in newest.objects)) as told:
            catalogue.copy(store, newest, target, told)
        print(f"{each.label}: copied")
    try:
        if newest is not None:
            commit(target, newest)
    except (Fenced, StaleStep) as error:
        print(f"keepstep: {options.target}: HEAD stays as it is: {error}", file=sys.stderr)
        return 1
    return 1 if unread else 0


def _prune(store: ObjectStore, job: str, options: argparse.Namespace) -> int:
    if options.keep_last < 1 or options.keep_every < 0:
        found = f"found {options.keep_last} and {options.keep_every}"
        raise ConfigError(found, "--keep-last of at least 1, --keep-every of at least 0", key="--keep-last")
    keep, sweeping = Retention(options.keep_last, options.keep_every), sweep_files if options.files else sweep
    with counter("deleted", "objects") as told:
        swept = sweeping(ToldStore(store, on_deleted=told), job, None, keep, unix_time())
    print(f"deleted {swept.manifests} checkpoints, {swept.objects} objects, {swept.unfinished} unfinished uploads")
    return 0


def _export(store: ObjectStore, job: str, options: argparse.Namespace) -> int:
    slab = _slab(store, manifest := _one(store, job, options.step), options.rank or 0)
    exporting.export(store, manifest, slab, options)
    return 0


def _files(options: argparse.Namespace) -> int:
    try:
        found = read_sets(options.folder)
    except UnfitFile as error:
        raise ConfigError(error.found, error.wanted, file=error.file, key="DIR") from error
    rows = [
        {
            "name": each.name,
            "kind": each.kind.value,
            "step": each.step,
            "bytes": each.size_bytes,
            "written": date(each.mtime_ns // 10**9),
            "trouble": _trouble(options.folder, each),
        }
        for each in reversed(found)
    ]
    if options.json:
        print(json.dumps({"folder": str(options.folder), "sets": rows}))
    else:
        cells = [
            [str(row["name"]), str(row["kind"]), cell(row["step"]), size(row["bytes"]), str(row["written"]),
             str(row["trouble"]) or "whole"]
            for row in rows
        ]  # fmt: skip
        print(table(["name", "kind", "step", "size", "written", ""], cells))
    return 1 if any(row["trouble"] for row in rows) else 0


def _trouble(folder: Path, found: FileSet) -> str:
    """Why a set can not be relied on; empty where it is whole (of HDF5 files a changed value is not found)."""
    try:
        if any(writing(folder / file.name) is Writing.SOMEBODY for file in found.files):
            return "is being written"
        check_set(folder, found)
    except UnfitFile as error:
        return str(error)
    return ""
