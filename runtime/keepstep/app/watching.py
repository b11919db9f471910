"""The script's own checkpoint files as the fold sees them: what the uploader finds, keeps and puts back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from keepstep.adapters.clock import sleep
from keepstep.adapters.uploader import UploaderGone
from keepstep.app.storing import Storing
from keepstep.core import actions as a
from keepstep.core import events as e
from keepstep.core.events import Event
from keepstep.core.job import JobSpec
from keepstep.core.state import State

SILENT_S = 30.0
"""A script that has said nothing for so long will say nothing; what it wrote before is found then, or at its end."""
_LOOK_S = 20
_GONE_S = 0.5
_AGAIN_S = 2.0


class Watching:
    """One node's folder; without one nothing is ever asked."""

    def __init__(
        self, job: JobSpec, scratch: Path, storing: Storing, post: Callable[[Event], None], log: Callable[[str], None]
    ) -> None:
        self._folder, self._spool, self._needed = job.watch, scratch / "files", asyncio.Event()
        self._storing, self._post, self._log = storing, post, log
        self._edition = 0
        self._told: set[str] = set()

    async def run(self) -> None:
        """Post each new edition. Ends at once where no folder is watched, else never."""
        while self._folder:
            await self._needed.wait()
            try:
                reply = await self._storing.ask(self._command("watch", wait_s=_LOOK_S))
            except UploaderGone:
                await sleep(_GONE_S)
                continue
            if not reply.get("ok"):
                self._log(f"{self._folder} can not be watched: {reply.get('detail')}")
                await sleep(_LOOK_S)
                continue
            self._take_in(reply)

    def follow(self, state: State, now: float) -> None:
        """After each turn: is the script one whose folder is looked at while it runs?

        Where the policy leaves that open, a script gets some time to say how it is doing before anything is copied.
        """
        is_silent = bool(state.workers) and now >= state.workers[0].started_at + SILENT_S
        if state.policy.checkpoint.watch != "auto" or (is_silent and not state.files.heard):
            self._needed.set()
        elif state.files.heard:
            self._needed.clear()

    async def settle(self, action: a.SettleFiles) -> None:
        """Look at the folder now."""
        reply = await self._storing.attempt(action.operation, self._command("settle"))
        if reply is not None and reply.get("ok"):
            self._take_in(reply)
            self._post(e.FilesSettled(action.operation, action.mark, self._edition))

    async def keep(self, action: a.KeepFiles) -> None:
        """Commit what there is now."""
        command = self._command("keep", generation=action.generation, run=action.run)
        reply = await self._storing.attempt(action.operation, command)
        if reply is None:
            return
        if reply.get("ok"):
            edition, number, size_bytes = (int(reply[name]) for name in ("edition", "number", "uploaded_bytes"))
            kept = e.FilesKept(
                action.operation, edition, str(reply["manifest"]), number, size_bytes, float(reply["seconds"])
            )
            self._post(kept)
        elif reply.get("error") in ("fenced", "conflict"):
            self._log(f"files not kept: {reply.get('detail')}")
            self._post(e.CommitRefused(action.operation, action.generation, 0))
        elif reply.get("error") in ("corrupt", "missing"):
            self._post(e.OperationFailed(action.operation, str(reply.get("detail")), _AGAIN_S))

    async def put_back(self, action: a.PutBackFiles) -> None:
        """Have the folder hold what the script is to go on from."""
        command = self._command("put_back", manifest=action.manifest, own=action.own)
        reply = await self._storing.attempt(action.operation, command)
        if reply is None:
            return
        if reply.get("ok"):
            for name in reply["aside"]:
                self._log(f"{self._folder}/{name} moved aside: torn, or newer than what all go on from")
            for name in reply["brought"]:
                self._log(f"{self._folder}/{name} put back from the store")
            self._take_in(reply)
            brought, aside = len(reply["brought"]), len(reply["aside"])
            self._post(e.FilesPutBack(action.operation, action.generation, self._edition, brought, aside))
        elif reply.get("error") == "stuck":
            self._post(e.FilesStuck(action.operation, f"{self._folder}: {reply.get('detail')}"))
        elif reply.get("error") in ("corrupt", "missing"):
            self._post(e.CheckpointCorrupt(action.operation, action.manifest, str(reply.get("detail"))))

    def _command(self, what: str, **fields: object) -> dict[str, object]:
        """A command with what an uploader that was started anew has to know."""
        place = {"root": self._folder, "spool": str(self._spool), "after": self._edition}
        return {"command": what, **place, **fields}

    def _take_in(self, reply: dict[str, object]) -> None:
        trouble = {str(each) for each in _listed(reply.get("trouble"))}
        for each in sorted(trouble - self._told):
            self._log(f"not kept: {each}")
        self._told = trouble
        edition = int(str(reply["edition"]))
        if edition > self._edition:
            self._edition = edition
            self._post(e.FilesCopied(edition, tuple(str(each) for each in _listed(reply["sets"]))))


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else []
