"""Which files of a folder belong together, and which of them make a complete set, by names, sizes and times alone.

Whether their content is whole, `contents` says: a set that is complete here may hold a file that is being written.
Names: TensorFlow's (`PREFIX.index`, `PREFIX.data-0000i-of-0000n`, `PREFIX.meta` of the older saver), Keras's (`.keras`,
`.weights.h5`, `.h5`, the pair of `BackupAndRestore`), and what is passed over: SageMaker's markers, files that
TensorFlow and Keras are still writing, and hidden ones.
Source: the files that TensorFlow 2.21 and Keras 3.15 were seen to write; SageMaker's names from its toolkits.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from keepstep.checkpoint.files.state_file import STATE_NAME, NamedCheckpoints
from keepstep.core.values import frozen

BACKUP_WEIGHTS, BACKUP_METADATA = "latest.weights.h5", "training_metadata.json"
KERAS_SUFFIX, WEIGHTS_SUFFIX = ".keras", ".weights.h5"
HDF5_SUFFIXES = (".h5", ".hdf5")
_INDEX_SUFFIX, _GRAPH_SUFFIX = ".index", ".meta"
_SHARD = re.compile(r"(?P<prefix>.+)\.data-(?P<shard>\d{5,})-of-(?P<shards>\d{5,})", re.DOTALL)
_UNDER_WAY = r".*\.tempstate\d* | .*\.tmp[0-9a-f]{32}"
_UNFINISHED = re.compile(_UNDER_WAY, re.VERBOSE | re.DOTALL)
_IGNORED = re.compile(
    rf"\..* | .*\.sagemaker-(?:uploading|uploaded|ignore) | {_UNDER_WAY} | workertemp_\d+ | .*\.bkp",
    re.VERBOSE | re.DOTALL,
)
_SAVED_PART = re.compile(r"part-\d{5}-of-\d{5}")
_WORDS = "epoch|ep|e|step|iter|iteration|batch|ckpt|cp|checkpoint"
_NUMBER = re.compile(
    rf"(?P<word>(?<![a-z0-9])(?:{_WORDS})[-_=:.]?)?(?<![0-9])(?<![0-9]\.)(?P<digits>\d+)(?![a-z]|\.?\d)", re.IGNORECASE
)
_LAST_NUMBER = re.compile(r"-(?P<digits>\d+)")
_PART = re.compile(r"(?P<base>.+)_\d{5}\.weights\.h5", re.DOTALL)
_DIGITS_MAX = 18


class Kind(StrEnum):
    """Form of a checkpoint that a script writes by itself."""

    TENSORFLOW = "tensorflow"
    KERAS = "keras"
    WEIGHTS = "weights"
    HDF5 = "hdf5"
    BACKUP = "backup"


@frozen
class ListedFile:
    """A regular file as a folder's listing shows it; equal where nobody wrote to it in between."""

    name: str
    size_bytes: int
    mtime_ns: int
    inode: int


@frozen
class FileSet:
    """Files that make a checkpoint together.

    Attributes:
        kind: their form.
        name: TensorFlow's prefix, or the name of the only or first file.
        files: all of them, in the order in which they were written; the `checkpoint` file is none of them, since it
            speaks of other sets, too.
        step: number that the name tells (TensorFlow's save counter, an epoch, ...); None where it tells none, or two.
        is_named: the folder's `checkpoint` file names it, or would have had its writer not died.
    """

    kind: Kind
    name: str
    files: tuple[ListedFile, ...]
    step: int | None = None
    is_named: bool = False

    @property
    def mtime_ns(self) -> int:
        """When any of its files was last written to, as the file system says."""
        return max(file.mtime_ns for file in self.files)

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


Remains = frozenset[tuple[ListedFile, ...]]
"""The files of each set that was there before anybody watched."""


@dataclass
class _Bundle:
    """Files of one prefix: data files by how many there ought to be and number, and those that are alone."""

    shards: dict[int, dict[int, ListedFile]] = field(default_factory=dict)
    index: ListedFile | None = None
    graph: ListedFile | None = None


def is_ignored(name: str) -> bool:
    """Whether a file or folder of this name is nobody's checkpoint, whatever it holds."""
    return _IGNORED.fullmatch(name) is not None


def is_data_file(name: str) -> bool:
    """Whether a name is that of a bundle's data file, which TensorFlow replaces and never changes in place."""
    return _SHARD.fullmatch(name) is not None


def find_sets(
    listing: Iterable[ListedFile], state: NamedCheckpoints, remains: Remains | None = None
) -> tuple[FileSet, ...]:
    """The complete sets of a folder, the newest last.

    Sets whose names differ by their step alone are in the order of their steps, since times are of no use once
    SageMaker has downloaded the folder; among the rest it is the time that counts. The one that the `checkpoint` file
    names last comes behind those that an earlier training has left, whatever their steps; what was written since then
    and later than that one is newer still, and counts as named: a script died before it could say so.

    Args:
        listing: the regular files of one folder, in any order.
        state: what its `checkpoint` file names.
        remains: what was there before; None where that is not known, and all may have been.
    """
    files = {file.name: file for file in listing if not is_ignored(file.name) and file.name != STATE_NAME}
    found = [*_bundles(files, state), *_backup(files), *_single(files)]
    newest: dict[tuple[Kind, str], int] = {}
    for each in found:
        newest[family_of(each)] = max(newest.get(family_of(each), 0), each.mtime_ns)

    latest = {family_of(each): each for each in found if each.kind is Kind.TENSORFLOW and each.name == state.latest}
    ahead = {each.name for each in found if _is_ahead(each, latest.get(family_of(each)), remains)}

    def order(each: FileSet) -> tuple[object, ...]:
        family = family_of(each)
        standing = 2 if each.name in ahead else each is latest.get(family)
        return newest[family], family, standing, -1 if each.step is None else each.step, each.mtime_ns

    return tuple(replace(each, is_named=each.is_named or each.name in ahead) for each in sorted(found, key=order))


def _is_ahead(each: FileSet, latest: FileSet | None, remains: Remains | None) -> bool:
    """Whether a set was written after the one that the `checkpoint` file names last."""
    if remains is None or each.files in remains or latest is None or each.step is None or latest.step is None:
        return False
    return each.step > latest.step and each.mtime_ns > latest.mtime_ns


def find_torn(listing: Iterable[ListedFile], sets: Iterable[FileSet]) -> tuple[str, ...]:
    """Names of files that a writer left behind when it died: parts of bundles that are not complete, unfinished files.

    Args:
        listing: as `find_sets` took it.
        sets: what it found.
    """
    whole = {file.name for each in sets for file in each.files}
    prefixes = {each.name for each in sets if each.kind is Kind.TENSORFLOW}
    torn = []
    for name in (file.name for file in listing if not file.name.startswith(".")):
        shard = _SHARD.fullmatch(name)
        prefix = shard["prefix"] if shard is not None else name.removesuffix(_INDEX_SUFFIX)
        part = (shard is not None or prefix != name) and prefix not in prefixes
        if name not in whole and (part or _UNFINISHED.fullmatch(name)):
            torn.append(name)
    return tuple(torn)


def is_index(name: str) -> bool:
    """Whether a name is that of a bundle's index, or of anybody's: only its content tells."""
    return name.endswith(_INDEX_SUFFIX)


def is_saved_part(name: str) -> bool:
    """Whether TensorFlow gives this name to a part of a save, in a folder of its own, before all parts are merged."""
    return _SAVED_PART.fullmatch(name.partition(".")[0]) is not None


def parse_step(kind: Kind, name: str) -> int | None:
    """Number of the step or epoch that a set's name tells: `ckpt-123`, `model.05-0.21.keras`, `epoch=7-loss=0.3.h5`.

    TensorFlow puts it last, behind a hyphen. Elsewhere a number counts that follows a word such as `epoch`, or that is
    the only one; parts of decimal fractions and of words (`resnet50`) are none.
    """
    place = _step_place(kind, name)
    return None if place is None else int(name[slice(*place)])


def _step_place(kind: Kind, name: str) -> tuple[int, int] | None:
    stem = _stem(kind, name)
    if kind is Kind.TENSORFLOW:
        last = stem.rfind("-")
        counted = _LAST_NUMBER.fullmatch(stem, last) if last > 0 else None
        if counted is not None:
            return counted.span("digits") if len(counted["digits"]) <= _DIGITS_MAX else None
    numbers = [each for each in _NUMBER.finditer(stem) if len(each["digits"]) <= _DIGITS_MAX]
    told = [each for each in numbers if each["word"] is not None]
    told = told or [each for each in numbers if not stem[: each.start("digits")][-1:].isalpha()]
    return told[0].span("digits") if len(told) == 1 else None


def _stem(kind: Kind, name: str) -> str:
    suffixes = {Kind.KERAS: (KERAS_SUFFIX,), Kind.WEIGHTS: (WEIGHTS_SUFFIX,), Kind.HDF5: HDF5_SUFFIXES}.get(kind, ())
    for suffix in suffixes:
        name = name.removesuffix(suffix)
    return name


def family_of(each: FileSet) -> tuple[Kind, str]:
    """What the sets of one writer in a folder have in common: the name without the step."""
    place = _step_place(each.kind, each.name)
    return each.kind, each.name if place is None else f"{each.name[: place[0]]}#"


def _bundles(files: Mapping[str, ListedFile], state: NamedCheckpoints) -> Iterable[FileSet]:
    found: dict[str, _Bundle] = {}
    for name, file in files.items():
        shard = _SHARD.fullmatch(name)
        if shard is not None:
            bundle = found.setdefault(shard["prefix"], _Bundle())
            bundle.shards.setdefault(int(shard["shards"]), {})[int(shard["shard"])] = file
        elif name.endswith(_INDEX_SUFFIX):
            found.setdefault(name.removesuffix(_INDEX_SUFFIX), _Bundle()).index = file
        elif name.endswith(_GRAPH_SUFFIX):
            found.setdefault(name.removesuffix(_GRAPH_SUFFIX), _Bundle()).graph = file
    for prefix, bundle in found.items():
        whole = [shards for count, shards in bundle.shards.items() if set(shards) == set(range(count))]
        if bundle.index is None or not whole or is_saved_part(prefix):
            continue
        # a save of another number of data files leaves those of the one before it in place
        shards = max(whole, key=lambda shards: max(file.mtime_ns for file in shards.values()))
        members = (*(shards[number] for number in sorted(shards)), bundle.index)
        members += (bundle.graph,) if bundle.graph is not None else ()
        step = parse_step(Kind.TENSORFLOW, prefix)
        yield FileSet(Kind.TENSORFLOW, prefix, members, step, prefix in state.prefixes)


def _backup(files: Mapping[str, ListedFile]) -> Iterable[FileSet]:
    weights, metadata = files.get(BACKUP_WEIGHTS), files.get(BACKUP_METADATA)
    if weights is not None and metadata is not None and weights.mtime_ns <= metadata.mtime_ns:
        yield FileSet(Kind.BACKUP, BACKUP_WEIGHTS, (weights, metadata))


def _single(files: Mapping[str, ListedFile]) -> Iterable[FileSet]:
    for name, file in files.items():
        if name == BACKUP_WEIGHTS and BACKUP_METADATA in files:
            continue  # the metadata of the last save beside the weights of this one are no checkpoint
        part = _PART.fullmatch(name)
        if part is not None and f"{part['base']}.weights.json" in files:
            continue  # Keras's weights in several files: only that file's content says which they are
        kind = _single_kind(name)
        if kind is not None:
            yield FileSet(kind, name, (file,), parse_step(kind, name))


def _single_kind(name: str) -> Kind | None:
    if name.endswith(KERAS_SUFFIX):
        return Kind.KERAS
    if name.endswith(WEIGHTS_SUFFIX):
        return Kind.WEIGHTS
    return Kind.HDF5 if name.endswith(HDF5_SUFFIXES) else None
