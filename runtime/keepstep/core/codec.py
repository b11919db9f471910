"""Records, events and states to JSON and back, exactly; and the digest by which a replay proves its turns the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import compress, islice
from operator import attrgetter, is_, is_not
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from pydantic_core import to_json

from keepstep.core.events import Event
from keepstep.core.failures import Charges
from keepstep.core.job import JobSpec
from keepstep.core.policy import Policy
from keepstep.core.records import GenerationRecord, Record
from keepstep.core.state import Decision, State
from keepstep.core.values import names_of
from keepstep.core.view import Cluster, Seen

_READ: dict[str, Any] = {
    "record": Annotated[Record, Field(discriminator="kind")],
    "event": Annotated[Event, Field(discriminator="kind")],
    "job": JobSpec,
    "state": State,
    "policy": Policy,
    "charges": Charges,
}
_VARYING = tuple(name for name in names_of(State) if name not in ("job", "policy", "cluster"))
_PARTS = (*_VARYING, *(f"cluster.{name}" for name in names_of(Cluster)))
_state_values, _cluster_values = attrgetter(*_VARYING), attrgetter(*names_of(Cluster))
_TABLES = (
    "absent", "sighted", "cluster.nodes", "cluster.acks", "cluster.statuses", "cluster.uploads", "cluster.checks",
)  # fmt: skip


class Undecodable(Exception):
    """A text is not what this version writes."""


def encode_record(record: Record) -> str:
    """A record as compact JSON."""
    return _encode(record)


def decode_record(text: str) -> Record:
    """The record behind a JSON text.

    Raises:
        Undecodable: it is no record of this version.
    """
    return _decode("record", text)  # type: ignore[no-any-return]


def encode_event(event: Event) -> str:
    """An event as compact JSON."""
    return _encode(event)


def decode_event(value: object) -> Event:
    """The event behind plain JSON values.

    Raises:
        Undecodable: it is no event of this version.
    """
    try:
        return _reader("event").validate_python(value)  # type: ignore[no-any-return]
    except ValidationError as error:
        raise Undecodable(str(error)) from error


def encode_job(job: JobSpec) -> str:
    return _encode(job)


def decode_job(text: str) -> JobSpec:
    """Raises: Undecodable."""
    return _decode("job", text)  # type: ignore[no-any-return]


def encode_state(state: State) -> str:
    return _encode(state)


def decode_state(text: str) -> State:
    """Raises: Undecodable."""
    return _decode("state", text)  # type: ignore[no-any-return]


def decode_policy(text: str) -> Policy:
    """Raises: Undecodable."""
    return _decode("policy", text)  # type: ignore[no-any-return]


def encode_charges(charges: Charges) -> str:
    return _encode(charges)


def decode_charges(text: str) -> Charges:
    """Raises: Undecodable."""
    return _decode("charges", text)  # type: ignore[no-any-return]


class Digests:
    """Digests of one node's successive turns: only what has changed since the last one is read again."""

    def __init__(self) -> None:
        self._values: Sequence[object] = ()
        self._digests: list[int] = []
        self._generation: tuple[object, int] = (None, 0)

    def of(self, event: str, now: float, decision: Decision) -> str:
        """A short digest of a turn: its event, time and actions, and the state after it (what never changes left out).

        Args:
            event: as `encode_event` gives it, so that a byte altered in a journal shows even where nothing hung on it.
            now: unix seconds.
            decision: what was decided.
        """
        state = decision.state
        values = (*_state_values(state), *_cluster_values(state.cluster))
        if not self._digests:
            self._digests = [self._part(name, value, None, 0) for name, value in zip(_PARTS, values, strict=True)]
        else:
            # A state's parts are replaced, never changed; and most are kept, so that no Python code looks at each.
            for at in compress(range(len(values)), map(is_not, values, self._values)):
                self._digests[at] = self._part(_PARTS[at], values[at], self._values[at], self._digests[at])
        self._values = values
        parts = [_digest((event, now, decision.actions)), *self._digests]
        return f"{_digest(parts):016x}"

    def _part(self, name: str, value: object, before: object, digest: int) -> int:
        """The digest of a part, whose value was `before` when it was `digest`."""
        if name in _TABLES and isinstance(value, dict):
            return _sum(value, before, digest)
        if isinstance(value, GenerationRecord):
            return self._record(value)
        if isinstance(value, Seen):
            return _digest((self._record(value.record), value.revision))
        return _digest(value)

    def _record(self, record: Any) -> int:
        """The digest of a record; the generation's is long, and a state has it twice."""
        if self._generation[0] is not record:
            self._generation = (record, _digest(encode_record(record)))
        return self._generation[1]


def _sum(mapping: dict[object, object], before: object, digest: int) -> int:
    """The digest of a mapping: the sum of its entries', made from the one before by what has changed.

    A mapping may have hundreds of entries, of which one is new, and keys mostly stay in their order; so what looks at
    all of them is not Python code where they do.
    """
    if not isinstance(before, dict):
        return sum(map(_digest, mapping.items())) % 2**64
    gone: Iterable[object] = ()
    if len(mapping) >= len(before) and all(map(is_, mapping, before)):
        other = compress(mapping, map(is_not, mapping.values(), before.values()))
        changed = [*other, *islice(mapping, len(before), None)]
    else:
        changed = [key for key, value in mapping.items() if before.get(key, before) is not value]
        gone = before.keys() - mapping.keys()
    for key in changed:
        digest += _digest((key, mapping[key])) - (_digest((key, before[key])) if key in before else 0)
    return (digest - sum(_digest((key, before[key])) for key in gone)) % 2**64


def _digest(value: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "big")


def digest_of(event: str, now: float, decision: Decision) -> str:
    """The digest of one turn alone; see `Digests.of`."""
    return Digests().of(event, now, decision)


def _encode(value: object) -> str:
    return to_json(value).decode()


@cache
def _reader(what: str) -> TypeAdapter[Any]:
    """Made when it is wanted: it takes a while, and who only writes does not need it."""
    return TypeAdapter(_READ[what])


def _decode(what: str, text: str) -> Any:
    try:
        return _reader(what).validate_json(text)
    except ValidationError as error:
        raise Undecodable(str(error)) from error
