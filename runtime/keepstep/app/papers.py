"""What the uploader keeps in the store for a job beside its checkpoints: authority, notes, the list of cordons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from keepstep.app.giving import InvalidCommand, text
from keepstep.checkpoint import authority, cordons
from keepstep.checkpoint.keys import note_key
from keepstep.core.gpu_events import KeptCordon
from keepstep.ports.store import NotFound, ObjectStore

_NOTE_BYTES_MAX = 4 << 20
FILE_BYTES_MAX = 64 << 20
"""No more of a file is kept."""


def perform(what: str, command: Mapping[str, Any], store: ObjectStore, job: str) -> dict[str, object]:
    """Carry out one of the uploader's commands, and return what the reply holds.

    Raises:
        InvalidCommand: a field is missing or of a wrong type.
        StoreError: the store's own.
    """
    match what:
        case "note":
            return _note(command, store, job)
        case "recall":
            return _recall(command, store, job)
        case "cordons":
            return {"cordons": [asdict(entry) for entry in cordons.read_cordons(store, job)]}
        case "cordon":
            return _cordon(command, store, job)
    return _authority(what, command, store, job)


def _authority(what: str, command: Mapping[str, Any], store: ObjectStore, job: str) -> dict[str, object]:
    if what == "trust":
        found = authority.read_authority(store, job)
        return {"authority": found and found[0], "etag": found and found[1]}
    if what == "forget":
        return {"removed": authority.remove_authority(store, job, text(command, "etag"))}
    replaces = text(command, "replaces") if command.get("replaces") is not None else None
    return {"written": authority.put_authority(store, job, text(command, "authority"), replaces)}


def _note(command: Mapping[str, Any], store: ObjectStore, job: str) -> dict[str, object]:
    if "file" in command:
        with open(text(command, "file"), "rb") as file:
            content = file.read(FILE_BYTES_MAX)
    else:
        content = text(command, "text").encode()
    store.put(note_key(job, text(command, "place")), content)
    return {}


def _recall(command: Mapping[str, Any], store: ObjectStore, job: str) -> dict[str, object]:
    try:
        content = store.read(note_key(job, text(command, "place")), _NOTE_BYTES_MAX)
    except NotFound:
        return {"text": None}
    return {"text": content.decode(errors="replace")}


def _cordon(command: Mapping[str, Any], store: ObjectStore, job: str) -> dict[str, object]:
    entries, lifted = command.get("cordons"), command.get("lifted")
    if not isinstance(entries, list) or not isinstance(lifted, list) or not all(isinstance(w, str) for w in lifted):
        raise InvalidCommand("cordons must be a list of objects, and lifted one of strings")
    try:
        wanted = [KeptCordon(**entry) for entry in entries]
    except TypeError as error:
        raise InvalidCommand(f"cordons: {error}") from error
    cordons.lift_cordons(store, job, lifted)
    for entry in wanted:
        cordons.keep_cordon(store, job, entry)
    return {}
