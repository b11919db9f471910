"""The loop: take an event, decide, write it down, act. No branch here is worth testing on its own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from keepstep.adapters.clock import Clock
from keepstep.adapters.journal import VERSION, JournalWriter
from keepstep.core.actions import Action
from keepstep.core.codec import Digests, encode_event, encode_job, encode_state
from keepstep.core.decide import decide, initial_state
from keepstep.core.events import Event, TimerFired
from keepstep.core.job import JobSpec
from keepstep.core.policy import Policy
from keepstep.core.reasons import Reason
from keepstep.core.state import Decision, State

INBOX_MAX = 10_000
QUIET = frozenset(
    {
        Reason.NOTHING_TO_DO, Reason.STALE_REVISION, Reason.SNAPSHOT_SEALED, Reason.SNAPSHOT_VERIFIED,
        Reason.PREFLIGHT_AWAITED,
    }
)  # fmt: skip


class Supervisor:
    """One node: an inbox, a state, a journal, and hands."""

    def __init__(
        self, job: JobSpec, policy: Policy, clock: Clock, journal: JournalWriter, log: Callable[[str], None]
    ) -> None:
        self._clock, self._journal, self._log = clock, journal, log
        self._inbox: asyncio.Queue[Event] = asyncio.Queue(INBOX_MAX)
        started_at = clock.now()
        self.state: State = initial_state(job, policy, started_at)
        self._turn = 0
        self._digests = Digests()
        self._head: dict[str, object] = {
            "journal": VERSION,
            "job": encode_job(job),
            "policy": policy.model_dump_json(by_alias=True),
            "started_at": started_at,
            "pid": os.getpid(),
        }
        journal.post(self._head)

    def post(self, event: Event) -> None:
        """Sensors and hands report here, from the loop's thread; never waits."""
        self._inbox.put_nowait(event)

    async def run(self, perform: Callable[[Action], None], after: Callable[[State, Event, float], None]) -> int:
        """Turn facts into actions until the core says that this node is finished; return its exit code.

        Args:
            perform: the hands.
            after: told of the state after each turn, of its event and when it was, for what must follow it.
        """
        while self.state.exit_code is None:
            event = await self._next()
            now = self._clock.now()
            decision = decide(self.state, event, now)
            self._write(event, decision, now)
            self.state = decision.state
            for action in decision.actions:
                perform(action)
            after(self.state, event, now)
        return self.state.exit_code

    async def _next(self) -> Event:
        wake_at = self.state.wake_at
        if wake_at is None:
            return await self._inbox.get()
        try:
            async with asyncio.timeout(max(0.0, wake_at - self._clock.now())):
                return await self._inbox.get()
        except TimeoutError:
            return TimerFired()

    def _write(self, event: Event, decision: Decision, now: float) -> None:
        self._turn += 1
        encoded = encode_event(event)
        turn = {
            "n": self._turn,
            "now": now,
            "notes": [[note.reason.value, note.detail] for note in decision.notes],
            "actions": [type(action).__name__ for action in decision.actions],
            "digest": self._digests.of(encoded, now, decision),
        }
        self._journal.post(turn, event=encoded)
        if self._journal.is_full:
            state = {"n": self._turn, "state": encode_state(decision.state)}
            self._journal.begin_file([self._head, state])
        for note in decision.notes:
            if note.reason not in QUIET:
                self._log(f"{note.reason.value.replace('_', ' ')}{': ' if note.detail else ''}{note.detail}")
