"""`keepstep checkpoint export`: a checkpoint as one file that other programs read."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from keepstep.app.places import make_guest
from keepstep.app.showing import progress, size
from keepstep.app.told_store import ToldStore
from keepstep.checkpoint.manifest import Manifest
from keepstep.checkpoint.reading import StoredSlab
from keepstep.checkpoint.restore import fetch
from keepstep.errors import ConfigError
from keepstep.ports.store import ObjectStore

OF_TENSORFLOW = (".weights.h5", ".keras", ".ckpt")
"""Endings that only TensorFlow can write: with the model's builder."""

_MISFIT = 3
_START = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from keepstep_worker.export import main
sys.exit(main(sys.argv[1:]))
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add what `export` takes beside the store and the step."""
    text = (
        "NAME.safetensors; with a builder NAME.weights.h5, NAME.keras or a tf.train.Checkpoint's; with --files a folder"
    )
    command.add_argument("--to", type=Path, required=True, metavar="FILE", help=text)
    command.add_argument("--rank", type=int, help="whose local tensors (default 0; with a builder their mean)")
    text = "makes the model as the script does: TensorFlow's and Keras's own formats need it"
    command.add_argument("--builder", metavar="FILE.py:FUNCTION", help=text)
    command.add_argument("--python", default="python", help="the interpreter that has TensorFlow (default python)")


def export(store: ObjectStore, manifest: Manifest, slab: StoredSlab, options: argparse.Namespace) -> None:
    """Write a checkpoint to `--to`; nothing stands there under that name before it is whole.

    Raises:
        ConfigError: the arguments do not go together, or the file can not be written.
        CorruptObject: an object is not what the manifest says.
        StoreError: the store's own.
    """
    target: Path = options.to
    if not target.name:
        raise ConfigError(f"found {str(target)!r}", "the name of a file", key="--to")
    tensorflows = target.name.endswith(OF_TENSORFLOW)
    if tensorflows and not options.builder:
        raise ConfigError(
            f"found {target.name} and no builder", "FILE.py:FUNCTION that makes the model", key="--builder"
        )
    if options.builder and target.name.endswith(".safetensors"):
        raise ConfigError(
            f"found {target.name} with a builder", f"a name in {', '.join(OF_TENSORFLOW)}, or no builder", key="--to"
        )
    try:
        if options.builder:
            _write_by_tensorflow(store, manifest, options)
        else:
            _write_safetensors(slab, manifest.step, target)
    except OSError as error:
        raise ConfigError(f"{error.strerror}", "a file that can be written", file=str(target), key="--to") from error


def _write_safetensors(slab: StoredSlab, step: int, target: Path) -> None:
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with unfinished.open("wb") as file, progress(target.name, slab.size_bytes) as told:
            slab.copy_to(file.write, told)
            os.fsync(file.fileno())
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
    print(f"{target}: step {step}, {len(slab.tensors)} tensors, {size(slab.size_bytes)}")


def _write_by_tensorflow(store: ObjectStore, manifest: Manifest, options: argparse.Namespace) -> None:
    target: Path = options.to
    if not target.parent.is_dir():
        raise ConfigError(f"found no folder {target.parent}", "a folder that is there", key="--to")
    rank = manifest.world_size if options.rank is None and manifest.world_size > 1 else options.rank or 0
    with tempfile.TemporaryDirectory(prefix="keepstep-export-") as folder:
        size_bytes = manifest.replicated_bytes + manifest.local(min(rank, manifest.world_size - 1)).size_bytes
        with (Path(folder) / "slab").open("w+b") as file, progress(target.name, size_bytes) as told:
            fetch(ToldStore(store, on_read=told), manifest, rank, file.fileno())
        guest = make_guest(Path(folder) / "guest")
        words = [str(Path(folder) / "slab"), str(manifest.step), options.builder, str(target)]
        try:
            done = subprocess.run(
                [options.python, "-c", _START, str(guest), *words], stdout=subprocess.PIPE, check=False
            )
        except OSError as error:
            found = f"{options.python}: {error.strerror}"
            raise ConfigError(f"found {found}", "an interpreter that has TensorFlow", key="--python") from error
    if done.returncode == _MISFIT:
        raise ConfigError("found one that does not do, see above", "what makes the model of this job", key="--builder")
    if done.returncode:
        found = f"{options.python}, which ended with {done.returncode}, see above"
        raise ConfigError(f"found {found}", "an interpreter that has TensorFlow", key="--python")
    said = done.stdout.decode(errors="replace").strip().splitlines()
    if not said:
        found = f"found {options.python}, which has said nothing of what it wrote"
        raise ConfigError(found, "an interpreter that has TensorFlow", key="--python")
    print(f"{target}: step {manifest.step}, {said[-1]}")
    sys.stdout.flush()
