"""This host's goodput account: kept turn by turn, handed from agent to agent, and by the store to the next attempt."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from keepstep.adapters.clock import Clock, process_age_s, sleep
from keepstep.core import goodput
from keepstep.core.events import Event
from keepstep.core.goodput import Account, Bucket
from keepstep.core.state import State

Ask = Callable[[Mapping[str, object]], Awaitable[dict[str, Any]]]

_EVERY_S = 2.0
"""How often what is not known to init or to the metrics may be behind."""
_STORE_S = 3.0
_KEEP_EVERY_S = 60.0
_MARKS_KEPT = 32
FILE = "goodput.json"


class Accounting:
    """One host's account.

    Attributes:
        account: of this container.
        earlier: seconds by bucket of earlier attempts, the time between them included.
    """

    def __init__(self, host: str, folder: Path, clock: Clock) -> None:
        """Args: folder: for the account as a file."""
        self._host, self._folder, self._clock, self._place = host, folder, clock, f"goodput/{host}.json"
        self.account = Account(clock.now())
        self.earlier: dict[Bucket, float] = {}
        self._born_at = self.account.at
        self._told_at = 0.0
        self._has_recalled = False

    def begin(self, init_pid: int, memo: Mapping[str, Any]) -> None:
        """Take over what a former agent of this container left, or begin where the container did."""
        now = self._clock.now()
        try:
            kept = memo["account"]
            left = Account(
                float(kept["at"]),
                Bucket(kept["bucket"]),
                {Bucket(name): float(seconds) for name, seconds in kept["seconds"].items()},
                tuple((int(step), float(seconds)) for step, seconds in kept["marks"]),
            )
            self.earlier = {Bucket(name): float(seconds) for name, seconds in kept["earlier"].items()}
            self._born_at, self._has_recalled = float(kept["born_at"]), bool(kept["recalled"])
        except (KeyError, TypeError, ValueError, AttributeError):
            self._born_at = now - process_age_s(init_pid)
            self.account = Account(self._born_at)
            return
        self.account = goodput.resumed(left, now, Bucket.DETECT)

    def follow(self, state: State, event: Event, now: float) -> bool:
        """After each turn; True where it is time to tell init and the metrics."""
        self.account = goodput.after(self.account, state, event, now)
        if now < self._told_at + _EVERY_S:
            return False
        self._told_at = now
        return True

    def seconds(self) -> dict[str, float]:
        """All seconds by bucket, of earlier attempts as well."""
        return {
            bucket.value: self.account.seconds.get(bucket, 0.0) + self.earlier.get(bucket, 0.0) for bucket in Bucket
        }

    def memo(self) -> dict[str, object]:
        """What the next agent of this container takes over."""
        account = self.account
        return {
            "at": account.at,
            "bucket": account.bucket,
            "seconds": dict(account.seconds),
            "marks": account.marks[-_MARKS_KEPT:],
            "earlier": dict(self.earlier),
            "born_at": self._born_at,
            "recalled": self._has_recalled,
        }

    async def recall(self, ask: Ask) -> bool:
        """Take in what earlier attempts of the job came to on this host; False where the store can not say it."""
        if self._has_recalled:
            return True
        reply = await ask({"command": "recall", "place": self._place})
        if not reply.get("ok"):
            return False
        try:
            kept = json.loads(reply["text"])
            seconds = {Bucket(name): float(value) for name, value in kept["seconds"].items()}
            earlier = {Bucket(name): float(value) for name, value in kept.get("earlier", {}).items()}
            is_ours, between_s = kept.get("born_at") == self._born_at, max(0.0, self._born_at - float(kept["ended_at"]))
        except (KeyError, TypeError, ValueError, AttributeError):
            self._has_recalled = True
            return True
        seconds[Bucket.BETWEEN] = seconds.get(Bucket.BETWEEN, 0.0) + between_s
        # a former agent of this container may have left what it has of itself
        self.earlier, self._has_recalled = earlier if is_ours else seconds, True
        return True

    async def keep(self, ask: Ask) -> None:
        """Leave the account now and then, for an attempt after one that has no end. Never returns.

        What such an attempt came to behind the last of these counts as the time between the two.
        """
        while True:
            recalled = await self.recall(ask)
            await sleep(_KEEP_EVERY_S)
            if recalled:
                await ask({"command": "note", "place": self._place, "text": self._text(self.account.at)})

    async def remember(self, ask: Ask) -> None:
        """Leave the account for the next attempt; what is still to come counts as the time between the two.

        Where the store can not say what this is to be added to, it keeps what it has.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STORE_S):
                if await self.recall(ask):
                    await ask({"command": "note", "place": self._place, "text": self._close()})

    def write(self) -> None:
        """Leave it for people: the last thing that an agent does."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / FILE).write_text(self._close() + "\n", encoding="utf-8")
        except OSError:
            return  # the journal is in the same folder, and its writer has said so

    def _close(self) -> str:
        now = self._clock.now()
        self.account = goodput.until(self.account, now, Bucket.IDLE)
        return self._text(now)

    def _text(self, ended_at: float) -> str:
        return json.dumps({
            "host": self._host,
            "born_at": self._born_at,
            "ended_at": ended_at,
            "this_attempt_s": self.account.total_s,
            "seconds": self.seconds(),
            "earlier": dict(self.earlier),
        })  # fmt: skip
