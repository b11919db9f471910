"""`keepstep checkpoint ... --files`: what a script wrote itself and keepstep has committed."""

from __future__ import annotations

import argparse
import json
import sys

from keepstep.app.picking import find, open_store
from keepstep.app.showing import cell, date, progress, size, standing, table, told_of_head, told_of_unread
from keepstep.app.told_store import ToldStore
from keepstep.checkpoint import catalogue
from keepstep.checkpoint.commit import Fenced, StaleStep, commit
from keepstep.checkpoint.files.watched import Tree
from keepstep.checkpoint.filing.keeping import verify_files
from keepstep.checkpoint.filing.manifest import FilesManifest
from keepstep.checkpoint.filing.put_back import put_back
from keepstep.checkpoint.keys import files_line
from keepstep.checkpoint.strict_json import MalformedDocument
from keepstep.errors import ConfigError
from keepstep.ports.store import ObjectStore


def ls(store: ObjectStore, job: str, options: argparse.Namespace) -> int:
    """List them, the newest first."""
    rows = [
        {
            "name": each.label,
            "number": each.name.step,
            "generation": each.name.generation,
            "bytes": each.manifest and each.manifest.size_bytes,
            "created": each.manifest and date(each.manifest.created_unix),
            "sets": each.manifest and [found.label for found in each.manifest.sets],
            "newest": each.is_newest,
            "trouble": each.trouble,
        }
        for each in catalogue.files_checkpoints(store, job)
    ]
    if options.json:
        print(json.dumps({"job": job, "files": rows}))
        return 0
    cells = [
        [
            str(row["number"]), str(row["generation"]), size(row["bytes"]), cell(row["created"]), str(row["name"]),
            cell(row["sets"]), standing(row),
        ]
        for row in rows
    ]  # fmt: skip
    print(table(["number", "generation", "size", "created", "name", "sets", ""], cells))
    return 0


def show(store: ObjectStore, job: str, options: argparse.Namespace) -> int:
    """Show one's files."""
    manifest = _one(store, job, options.step)
    if options.json:
        print(json.dumps({"manifest": json.loads(manifest.to_bytes())}))
        return 0
    print(f"{job}: files number {manifest.step} of generation {manifest.generation}, run {manifest.run}, ", end="")
    print(f"{date(manifest.created_unix)}, {manifest.digest}")
    rows = [
        [each.label, each.kind.value, file.name, size(file.size_bytes), date(file.mtime_ns // 10**9), file.key]
        for each in manifest.sets
        for file in each.files
    ]
    print(table(["set", "kind", "file", "size", "written", "object"], rows))
    return 0


def verify(store: ObjectStore, job: str, options: argparse.Namespace) -> int:
    """Read them back, every byte."""
    listed = catalogue.files_checkpoints(store, job)
    found = {each.label: each for wanted in options.step for each in find(listed, job, wanted)}
    bad = told_of_head(catalogue.head_trouble(store, files_line(job), listed))
    for name, each in found.items():
        wrong = [each.trouble]
        if each.manifest is not None:
            with progress(name, each.manifest.size_bytes) as told:
                wrong = verify_files(store, each.manifest, told)
        bad += bool(wrong)
        print(f"{name}: {'; '.join(wrong) or 'sound'}")
    return 1 if bad else 0


def copy(store: ObjectStore, job: str, options: argparse.Namespace) -> int:
    """Copy them to another store."""
    target = open_store(options.target, options.target_endpoint, "TARGET", options.encryption)
    newest, unread = None, 0
    for each in reversed(find(catalogue.files_checkpoints(store, job), job, options.step)):
        if each.manifest is None:
            unread += told_of_unread(each.label, each.trouble)
            continue
        newest = each.manifest
        with progress(each.label, newest.size_bytes) as told:
            catalogue.copy_files(store, newest, target, told)
        print(f"{each.label}: copied")
    try:
        if newest is not None:
            commit(target, newest)
    except (Fenced, StaleStep) as error:
        print(f"keepstep: {options.target}: HEAD stays as it is: {error}", file=sys.stderr)
        return 1
    return 1 if unread else 0


def export(store: ObjectStore, job: str, options: argparse.Namespace) -> int:
    """Write one's files into a folder, as the script had written them."""
    manifest = _one(store, job, options.step)
    try:
        if options.to.is_dir() and any(options.to.iterdir()):
            raise ConfigError("found files there", "a folder that is empty or new", file=str(options.to), key="--to")
        with progress(options.to.name, manifest.size_bytes) as told:
            put_back(ToldStore(store, on_read=told), manifest, Tree(options.to), own=False)
    except OSError as error:
        text = "a folder that can be written"
        raise ConfigError(f"{error.strerror}", text, file=str(options.to), key="--to") from error
    sets = ", ".join(each.label for each in manifest.sets)
    print(f"{options.to}: number {manifest.step}, {sets}, {size(manifest.size_bytes)}")
    return 0


def _one(store: ObjectStore, job: str, wanted: str) -> FilesManifest:
    (listed,) = find(catalogue.files_checkpoints(store, job), job, wanted)[:1]
    if listed.manifest is None:
        raise MalformedDocument(f"{listed.label}: {listed.trouble}")
    return listed.manifest
