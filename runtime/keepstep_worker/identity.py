"""Who this worker is, as the agent told it through the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

_WIRE_FD = "KEEPSTEP_WIRE_FD"
_SOCKET_FD = "KEEPSTEP_SOCKET_FD"
_SERVER = "KEEPSTEP_SERVER"
DESCRIPTOR_VARIABLES = (_WIRE_FD, _SOCKET_FD)
"""Only this process may use them: they are taken out of the environment of the programs it starts."""

KEEP_GLOBAL, KEEP_LOCAL = "keep_global", "keep_local"
"""A smaller world takes the same global batch in larger shares, or the same share each of a smaller one."""


class IdentityError(Exception):
    """The environment of a worker is incomplete or malformed: a fault of the agent, not of the user."""


class Identity(NamedTuple):
    """One worker of one generation.

    Attributes:
        full_world: number of ranks where none is missing; 0 stands for `world_size`.
        batch: what a smaller world does with the batch: "keep_global" or "keep_local".
        parent_pid: the agent; 0 where it was not said.
        failure_file: where the first error goes; "" for nowhere.
        stacks_file: where the threads' stacks go when they are asked for; "" for nowhere.
        instrument: "auto" or "off".
        may_join: whether the script may report its steps.
        skipped: steps whose batch is to be left out.
        weights: how large a share of a global batch each rank takes beside the others; empty where all take the same.
    """

    generation: int
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    parent_pid: int = 0
    failure_file: str = ""
    instrument: str = "auto"
    full_world: int = 0
    batch: str = KEEP_GLOBAL
    stacks_file: str = ""
    skipped: frozenset[int] = frozenset()
    may_join: bool = True
    weights: tuple[int, ...] = ()


def is_worker(environ: Mapping[str, str] = os.environ) -> bool:
    """Tell whether an agent started this process and its descriptors were not taken over yet."""
    return _WIRE_FD in environ and _SOCKET_FD in environ


def is_server(environ: Mapping[str, str] = os.environ) -> bool:
    """Tell whether an agent started this process to serve another one that trains."""
    return _SERVER in environ


def wants_fingerprints(environ: Mapping[str, str] = os.environ) -> bool:
    """Tell whether the agent may want to know what this worker has computed in a step."""
    return environ.get("KEEPSTEP_FINGERPRINT") == "on"


def disown_servers() -> None:
    """Have what this process starts not take itself for the server."""
    os.environ.pop(_SERVER, None)


def read_identity(environ: Mapping[str, str] = os.environ) -> Identity:
    """Return who this worker is.

    Raises:
        IdentityError: a variable is missing or no number.
    """

    def number(name: str, default: int | None = None) -> int:
        return _number(environ, name, default)

    batch = environ.get("KEEPSTEP_BATCH", KEEP_GLOBAL)
    if batch not in (KEEP_GLOBAL, KEEP_LOCAL):
        raise IdentityError(f"KEEPSTEP_BATCH is {batch!r}, wanted {KEEP_GLOBAL} or {KEEP_LOCAL}")
    return Identity(
        generation=number("KEEPSTEP_GENERATION"),
        rank=number("KEEPSTEP_RANK", 0),
        local_rank=number("KEEPSTEP_LOCAL_RANK", 0),
        world_size=number("KEEPSTEP_WORLD_SIZE", 1),
        parent_pid=parent_pid(environ),
        failure_file=environ.get("KEEPSTEP_FAILURE_FILE", ""),
        instrument=environ.get("KEEPSTEP_INSTRUMENT", "auto"),
        full_world=number("KEEPSTEP_FULL_WORLD", 0),
        batch=batch,
        stacks_file=environ.get("KEEPSTEP_STACKS_FILE", ""),
        may_join=environ.get("KEEPSTEP_JOIN", "on") != "off",
        skipped=frozenset(_numbers("KEEPSTEP_SKIP", environ)),
        weights=_numbers("KEEPSTEP_WEIGHTS", environ),
    )


def parent_pid(environ: Mapping[str, str] = os.environ) -> int:
    """Return the agent's process id, 0 where it was not said.

    Raises:
        IdentityError: it is no number.
    """
    return _number(environ, "KEEPSTEP_PARENT_PID", 0)


def _numbers(name: str, environ: Mapping[str, str]) -> tuple[int, ...]:
    text = environ.get(name, "")
    try:
        return tuple(int(word) for word in text.split(",") if word)
    except ValueError:
        raise IdentityError(f"{name} is {text!r}, wanted whole numbers with commas between them") from None


def _number(environ: Mapping[str, str], name: str, default: int | None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError as error:
        raise IdentityError(f"{name} is {text!r}, wanted a number") from error


def descriptor_variables(wire_fd: int, socket_fd: int) -> dict[str, str]:
    """Return the variables that name the descriptors of the wire and of the socket."""
    return {_WIRE_FD: str(wire_fd), _SOCKET_FD: str(socket_fd)}


def read_descriptors(environ: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return the descriptors of the wire and of the socket.

    Raises:
        IdentityError: one is missing or no number.
    """
    try:
        return int(environ[_WIRE_FD]), int(environ[_SOCKET_FD])
    except (KeyError, ValueError) as error:
        raise IdentityError(f"{_WIRE_FD} and {_SOCKET_FD} must be numbers: {error}") from error
