"""Records, events and states to JSON and back, exactly; and the digest by which a replay proves its turns the same."""

from __future__ import annotations

import hashlib
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from keepstep.core.events import Event
from keepstep.core.job import JobSpec
from keepstep.core.policy import Policy
from keepstep.core.records import Record
from keepstep.core.state import Decision, State
from keepstep.core.view import Cluster

_RECORD: TypeAdapter[Any] = TypeAdapter(Annotated[Record, Field(discriminator="kind")])
_EVENT: TypeAdapter[Any] = TypeAdapter(Annotated[Event, Field(discriminator="kind")])
_JOB: TypeAdapter[Any] = TypeAdapter(JobSpec)
_STATE: TypeAdapter[Any] = TypeAdapter(State)
_VARYING = tuple(name for name in State.__slots__ if name not in ("job", "policy", "cluster"))


class Undecodable(Exception):
    """A text is not what this version writes."""


def encode_record(record: Record) -> str:
    """A record as compact JSON."""
    return str(_RECORD.dump_json(record).decode())


def decode_record(text: str) -> Record:
    """The record behind a JSON text.

    Raises:
        Undecodable: it is no record of this version.
    """
    return _decode(_RECORD, text)  # type: ignore[no-any-return]


def encode_event(event: Event) -> Any:
    """An event as plain JSON values."""
    return _EVENT.dump_python(event, mode="json")


def decode_event(value: object) -> Event:
    """The event behind plain JSON values.

    Raises:
        Undecodable: it is no event of this version.
    """
    try:
        return _EVENT.validate_python(value)  # type: ignore[no-any-return]
    except ValidationError as error:
        raise Undecodable(str(error)) from error


def encode_job(job: JobSpec) -> str:
    return str(_JOB.dump_json(job).decode())


def decode_job(text: str) -> JobSpec:
    """Raises: Undecodable."""
    return _decode(_JOB, text)  # type: ignore[no-any-return]


def encode_state(state: State) -> str:
    return str(_STATE.dump_json(state).decode())


def decode_state(text: str) -> State:
    """Raises: Undecodable."""
    return _decode(_STATE, text)  # type: ignore[no-any-return]


def decode_policy(text: str) -> Policy:
    """Raises: Undecodable."""
    return _decode(TypeAdapter(Policy), text)  # type: ignore[no-any-return]


class Digests:
    """Digests of one node's successive turns: of what did not change since the last one, the words are kept."""

    def __init__(self) -> None:
        self._words: dict[str, tuple[object, str]] = {}

    def of(self, event: object, now: float, decision: Decision) -> str:
        """A short digest of a turn: its event, time and actions, and the state after it (what never changes left out).

        Args:
            event: as `encode_event` gives it, so that a byte altered in a journal shows even where nothing hung on it.
            now: unix seconds.
            decision: what was decided.
        """
        state = decision.state
        words = [repr((event, now, decision.actions))]
        words += [self._words_of(name, getattr(state, name)) for name in _VARYING]
        words += [self._words_of(f"cluster.{name}", getattr(state.cluster, name)) for name in Cluster.__slots__]
        return hashlib.blake2b("\n".join(words).encode(), digest_size=8).hexdigest()

    def _words_of(self, name: str, value: object) -> str:
        known = self._words.get(name)
        if known is None or known[0] is not value:  # a state's parts are replaced, never changed
            known = self._words[name] = (value, repr(value))
        return known[1]


def digest_of(event: object, now: float, decision: Decision) -> str:
    """The digest of one turn alone; see `Digests.of`."""
    return Digests().of(event, now, decision)


def _decode(adapter: TypeAdapter[Any], text: str) -> Any:
    try:
        return adapter.validate_json(text)
    except ValidationError as error:
        raise Undecodable(str(error)) from error
