"""How a job's objects are named in the store; names carry generation and run, so that a stale one never overwrites.

<job>/HEAD.json                                    the newest committed checkpoint, and who may commit the next
<job>/manifests/<generation>-<step>-<run>.json     a checkpoint exists when its manifest does
<job>/objects/g<generation>/s<step>/replicated-<rank>-of-<world size>.<run>
<job>/objects/g<generation>/s<step>/local-<rank>.<run>
<job>/objects/g<generation>/s<step>/tensors-<rank>.<run>    the CRCs of a rank's tensors; no manifest names it
<job>/probe/<nonce>                                written and removed when a store is opened
<job>/trust/authority.json                         by what the hosts know each other; removed at the end of the job
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


def head_key(job: str) -> str:
    return f"{job}/HEAD.json"


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
