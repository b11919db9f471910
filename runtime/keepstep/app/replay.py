"""Fold a journal again: the same events must lead to the same actions and the same state, turn by turn."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from keepstep.adapters.journal import JournalError, read_lines
from keepstep.core.codec import (
    Undecodable,
    decode_event,
    decode_job,
    decode_policy,
    decode_state,
    digest_of,
    encode_event,
)
from keepstep.core.decide import decide, initial_state
from keepstep.core.events import Event
from keepstep.core.state import Decision, State
from keepstep.core.values import frozen

_UNSOUND = (Undecodable, LookupError, TypeError, ValueError, ArithmeticError, AttributeError, AssertionError)
"""What reading a line may raise, or folding an event that never happened."""


class ReplayDiffers(Exception):
    """A turn came out otherwise than it was recorded."""


@frozen
class ReplayedTurn:
    """One turn: its number, time (unix seconds), event, and what was decided, now as then."""

    number: int
    now: float
    event: Event
    decision: Decision


def replay(path: Path) -> Iterator[ReplayedTurn]:
    """Fold the journal at `path` from its beginning.

    A line that says that turns were dropped ends the proof; folding goes on at the next recorded state.

    Raises:
        JournalError: the file is not a journal of this version.
        ReplayDiffers: a digest is not the recorded one; names the turn.
    """
    state: State | None = None
    for line_number, line in read_lines(path):
        try:
            if "journal" in line:
                state = _first_state(path, line)
            elif "state" in line:
                state = decode_state(line["state"])
            elif "dropped" in line:
                state = None
            elif state is not None:
                turn = _fold(path, line_number, state, line)
                state = turn.decision.state
                yield turn
        except _UNSOUND as error:
            turn_number = f"turn {line['n']}: " if "n" in line else ""
            text = f"{path}:{line_number}: {turn_number}not a line of a journal of this version: {error!r}"
            raise JournalError(text) from error


def _first_state(path: Path, line: dict[str, Any]) -> State:
    if line["journal"] != 1:
        raise JournalError(f"{path}:1: journal version {line['journal']}, wanted 1")
    return initial_state(decode_job(line["job"]), decode_policy(line["policy"]), float(line["started_at"]))


def _fold(path: Path, line_number: int, state: State, line: dict[str, Any]) -> ReplayedTurn:
    event, now = decode_event(line["event"]), float(line["now"])
    encoded = encode_event(event)
    if json.loads(encoded) != line["event"]:  # a key that is not known, or one that is missing, would fold unseen
        text = f"{path}:{line_number}: turn {line['n']}: found the event {line['event']}, wanted {encoded}"
        raise JournalError(text)
    decision = decide(state, event, now)
    digest = digest_of(encoded, now, decision)
    if digest != line["digest"]:
        notes = ", ".join(note.reason.value for note in decision.notes)
        recorded = ", ".join(reason for reason, _ in line["notes"])
        raise ReplayDiffers(
            f"{path}:{line_number}: turn {line['n']} ({line['event']['kind']}) differs: "
            f"recorded {line['digest']} ({recorded}), now {digest} ({notes})"
        )
    return ReplayedTurn(int(line["n"]), now, event, decision)


def journals_under(folder: Path) -> list[Path]:
    """Every journal below a folder, rotated ones first, in the order in which they were written."""
    # of a job that runs, folders come and go meanwhile: os.walk passes over those that are gone
    places = (Path(place, name) for place, _, names in os.walk(folder) for name in names)
    found = [path for path in places if path.name.startswith("journal.jsonl") and path.is_file()]
    return sorted(found, key=lambda path: (str(path.parent), -_age(path)))


def _age(path: Path) -> int:
    suffix = path.name.removeprefix("journal.jsonl").lstrip(".")
    return int(suffix) if suffix.isdigit() else 0
