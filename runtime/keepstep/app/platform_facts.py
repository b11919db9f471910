"""What `keepstep doctor --aws` asks of a container, each thing by itself: what hangs or fails holds up no other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from keepstep.adapters.imds import survey_metadata
from keepstep.adapters.platform import machine, rights
from keepstep.adapters.platform.record import Record

Fact = Callable[[], Mapping[str, object]]

SECRET_CHARACTERS_MIN = 6
"""What is shorter is no secret, and part of many a word."""
METADATA_EVERY_S = 10.0
_OF_AWS = ("AWS_", "ECS_", "SAGEMAKER_")
_CAN_NOT_BE_HAD = (OSError, ValueError, LookupError, AttributeError, TypeError)


def facts_of(base: Path, current_host: str, environ: Mapping[str, str]) -> list[tuple[str, Fact]]:
    """What is asked, by the word that its line has."""
    folders = ("/dev/shm", "/tmp", "/", *(str(base / name) for name in ("", "input", "output", "model", "checkpoints")))
    return [
        ("kernel", machine.kernel),
        ("cgroup", machine.cgroup),
        ("processors", machine.processors),
        *(("space", partial(machine.space, folder)) for folder in folders),
        ("limits", machine.limits),
        ("mounts", partial(machine.read_mounts, str(base))),
        ("names", partial(machine.names, current_host)),
        ("identity", rights.identity),
        ("calls", rights.calls),
        ("environment", partial(names_in, environ)),
        ("devices", machine.devices),
        ("interfaces", machine.interfaces),
        ("clocks", machine.clocks),
    ]


def names_in(environ: Mapping[str, str]) -> dict[str, object]:
    """The names of all variables, and of those through which AWS's tools get credentials; never a value."""
    credentials = [name for name in environ if name.startswith(_OF_AWS) and rights.SENSITIVE.search(name)]
    credentials += [name for name in environ if name.startswith(("AWS_ROLE", "AWS_PROFILE", "AWS_WEB_IDENTITY"))]
    return {"names": sorted(environ), "credentials": sorted(set(credentials))}


def secrets_in(environ: Mapping[str, str]) -> set[str]:
    """Values that must not be seen even where something else, as a command, holds them."""
    named = (value for name, value in environ.items() if rights.SENSITIVE.search(name))
    return {value for value in named if len(value) >= SECRET_CHARACTERS_MIN}


def found_by(fact: Fact) -> Mapping[str, object]:
    """A fact, or why it can not be had."""
    try:
        return fact()
    except _CAN_NOT_BE_HAD as error:
        return {"error": f"{type(error).__name__}: {error}"}


def tell_all(record: Record, facts: list[tuple[str, Fact]]) -> None:
    """Have each fact told by a thread of its own."""

    def tell(what: str, fact: Fact) -> None:
        record.write(what, **found_by(fact))

    for what, fact in facts:
        threading.Thread(target=tell, args=(what, fact), name=what, daemon=True).start()


def follow_metadata(record: Record, stop: threading.Event) -> None:
    """Say how the instance's metadata service answers, again when that changes: a notice is a 404 that became 200."""
    told: dict[str, object] = {}
    while not stop.is_set():
        found = survey_metadata()
        if found != told:
            record.write("metadata", **found)
        if not any(isinstance(status, int) for status in found.values()):
            return  # nobody is there
        told = found
        stop.wait(METADATA_EVERY_S)
