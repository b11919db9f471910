"""How a job's objects are named in the store; names carry generation and run, so that a stale one never overwrites.

<job>/HEAD.json                                    the newest committed checkpoint, and who may commit the next
<job>/manifests/<generation>-<step>-<run>.json     a checkpoint exists when its manifest does
<job>/objects/g<generation>/s<step>/replicated-<rank>-of-<world size>.<run>
<job>/objects/g<generation>/s<step>/local-<rank>.<run>
<job>/objects/g<generation>/s<step>/tensors-<rank>.<run>    the CRCs of a rank's tensors; no manifest names it
    <run> is <run>-alone<rank> where that rank saves what it holds as a world of one, since it can reach nobody
<job>/probe/<nonce>                                written and removed when a store is opened
<job>/trust/authority.json                         by what the hosts know each other; removed at the end of the job
<job>/cordons/<GPU's UUID, or boot id>.json        what is to take no part in the job, whatever host has it
<job>/notes/goodput/<host>.json                    where a host's time went, in all attempts so far
<job>/notes/charges.json                           restarts, and failures charged to budgets, in all attempts so far
<job>/notes/stacks/<host>/generation-<number>-rank-<rank>.txt     what a worker that stood still was doing

What a script wrote itself has a line of its own, `<job>/files`, numbered by commits instead of steps:

<job>/files/HEAD.json, <job>/files/manifests/...   as above
<job>/files/objects/g<generation>/s<number>/<nonce>/<place>-<name>    a file as the script wrote it
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_NUMBER = r"(0|[1-9][0-9]{0,17})"
_MANIFEST = re.compile(rf"{_NUMBER}-{_NUMBER}-([A-Za-z0-9][A-Za-z0-9_-]{{0,63}})\.json")
_OBJECT = re.compile(
    rf"g{_NUMBER}/s{_NUMBER}/(?:replicated-{_NUMBER}-of-{_NUMBER}|(?:local|tensors)-{_NUMBER})\.[A-Za-z0-9][A-Za-z0-9_-]{{0,63}}"
)
_FILE = re.compile(rf"g{_NUMBER}/s{_NUMBER}/[0-9a-f]{{8,64}}/{_NUMBER}-[A-Za-z0-9._=+@,-]{{1,128}}")
_NOT_IN_KEYS = re.compile(r"[^A-Za-z0-9._=+@,-]")


@dataclass(frozen=True, order=True)
class ManifestName:
    """What a manifest's key says; ordered from the oldest to the newest."""

    generation: int
    step: int
    run: str

    def key(self, job: str) -> str:
        return f"{job}/manifests/{self.generation}-{self.step}-{self.run}.json"


def is_job(text: str) -> bool:
    """Whether `text` can be a job's name in the store."""
    return _JOB.fullmatch(text) is not None


def is_run(text: str) -> bool:
    """Whether `text` can be a run's nonce."""
    return _RUN.fullmatch(text) is not None


def files_line(job: str) -> str:
    """What stands for the job where its script's own files are meant."""
    return f"{job}/files"


def file_key(line: str, name: ManifestName, nonce: str, place: int, file: str) -> str:
    """Key of a script's own file, the `place`-th of its checkpoint; the name is for people to read."""
    shown = _NOT_IN_KEYS.sub("_", file)[-128:]
    return f"{objects_prefix(line)}g{name.generation}/s{name.step}/{nonce}/{place}-{shown}"


def parse_file_key(line: str, key: str) -> tuple[int, int] | None:
    """Generation and number of a file's key; None where it is none of this line."""
    prefix = objects_prefix(line)
    found = _FILE.fullmatch(key, len(prefix)) if key.startswith(prefix) else None
    return (int(found[1]), int(found[2])) if found else None


def head_key(job: str) -> str:
    return f"{job}/HEAD.json"


def note_key(job: str, place: str) -> str:
    """Key of something that is kept for people, or for the next attempt; names of hosts may have any letters."""
    parts = [_NOT_IN_KEYS.sub("_", part).lstrip(".") or "_" for part in place.split("/")]
    return "/".join([job, "notes", *parts])


def cordons_prefix(job: str) -> str:
    return f"{job}/cordons/"


def cordon_key(job: str, what: str) -> str:
    """Key of the entry of a GPU, or of a machine, that is cordoned."""
    return f"{cordons_prefix(job)}{_NOT_IN_KEYS.sub('_', what).lstrip('.') or '_'}.json"


def manifests_prefix(job: str) -> str:
    return f"{job}/manifests/"


def objects_prefix(job: str) -> str:
    return f"{job}/objects/"


def probe_prefix(job: str) -> str:
    return f"{job}/probe/"


def replicated_key(job: str, name: ManifestName, rank: int, world_size: int) -> str:
    """Key of the share of the replicated region that `rank` uploads."""
    return f"{job}/objects/g{name.generation}/s{name.step}/replicated-{rank}-of-{world_size}.{name.run}"


def local_key(job: str, name: ManifestName, rank: int) -> str:
    """Key of what belongs to `rank` alone."""
    return f"{job}/objects/g{name.generation}/s{name.step}/local-{rank}.{name.run}"


def tensors_key(job: str, name: ManifestName, rank: int) -> str:
    """Key of the CRCs of a rank's tensors."""
    return f"{job}/objects/g{name.generation}/s{name.step}/tensors-{rank}.{name.run}"


def parse_manifest_key(job: str, key: str) -> ManifestName | None:
    """What a manifest's key says; None where it is no manifest's of this job."""
    prefix = manifests_prefix(job)
    found = _MANIFEST.fullmatch(key, len(prefix)) if key.startswith(prefix) else None
    return ManifestName(int(found[1]), int(found[2]), found[3]) if found else None


def parse_object_key(job: str, key: str) -> tuple[int, int] | None:
    """Generation and step of an object's key; None where it is no object's of this job."""
    prefix = objects_prefix(job)
    found = _OBJECT.fullmatch(key, len(prefix)) if key.startswith(prefix) else None
    return (int(found[1]), int(found[2])) if found else None
