"""A slow worker and a healthy one are looked at: where their Python is, what TensorFlow does in some of their steps.

What is found lies in `profiles/generation-G-step-S-rank-R` beside the journal, whole or not at all: a sample by py-spy,
TensorFlow's profile as TensorBoard reads it, and a report that says what it is about. S is the step at which the
straggler was found, so that the folders of both ranks are named alike. Everything is bounded in time, and given up
where the worker or the job ends.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from keepstep.adapters import stacks
from keepstep.adapters.uploader import UploaderGone
from keepstep.adapters.worker_link import WorkerLink
from keepstep.app.papers import FILE_BYTES_MAX
from keepstep.app.storing import Storing
from keepstep.core.actions import ProfileWorker
from keepstep.core.events import Event
from keepstep.core.profiles import WorkerProfiled
from keepstep.core.stragglers import describe

SAMPLE_S = 5.0
STEPS, STEPS_S = 20, 5.0
"""TensorFlow profiles so many steps, or those of so many seconds: what it writes grows with them."""
_ANSWER_S, _ANSWER_STEPS = 120.0, 3
"""A profile takes a step at least, begun behind one under way, and is then written down: by a process that may get as
little processor time as the worker that it is a copy of."""
_LOOK_EVERY_S = 0.5
_SAMPLE, _REPORT = "py-spy.speedscope.json", "report.json"


class Profiling:
    """Looks at this host's worker for some seconds, one look at a time, and keeps what it sees."""

    def __init__(
        self,
        link: WorkerLink,
        storing: Storing,
        folder: Path,
        post: Callable[[Event], None],
        log: Callable[[str], None],
    ) -> None:
        """Args: folder: where profiles are kept, of the host that it is named after; in the store as well."""
        self._link, self._storing, self._post, self._log = link, storing, post, log
        self._folder, self._place = folder / "profiles", f"profiles/{folder.name}"
        self._said: Mapping[str, object] = {}
        self._answered = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._lane = asyncio.Lock()

    async def perform(self, action: ProfileWorker) -> None:
        """Do what is asked for, and answer; what can not be had is told with what can."""
        task = asyncio.ensure_future(self._look_at(action))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.wait({task})
        if not task.cancelled():
            task.result()

    def close(self) -> None:
        """The job is over: give up what is under way."""
        for task in self._tasks:
            task.cancel()

    def on_profiled(self, worker_id: str, message: Mapping[str, object]) -> None:
        """The worker says how its profile has ended."""
        self._said = message
        self._answered.set()

    async def _look_at(self, action: ProfileWorker) -> None:
        async with self._lane:
            step = action.profile.split.step
            folder = self._folder / f"generation-{action.generation}-step-{step}-rank-{action.rank}"
            begun = folder.with_name(f"{folder.name}.part")
            try:
                files, trouble = await self._fill(action, begun)
                if files:
                    begun.replace(folder)
            except OSError as error:
                files, trouble = [], [f"it can not be kept: {error}"]
            finally:
                shutil.rmtree(begun, ignore_errors=True)
            kept = str(folder) if files else ""
            self._post(WorkerProfiled(action.operation, action.worker_id, kept, tuple(files), tuple(trouble)))
            if files and self._storing.has_store:
                await self._store(folder, [*files, _REPORT])

    async def _fill(self, action: ProfileWorker, folder: Path) -> tuple[list[str], list[str]]:
        """Both profiles and the report, as far as they are to be had; the names of the files, and what went wrong.

        One after the other: what one costs is not seen in the other.

        Raises:
            OSError: the folder can not be written.
        """
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        first, trouble = self._link.progress().pid, []
        pid = self._link.pid_of(action.rank)
        try:
            await stacks.record(pid, SAMPLE_S, folder / _SAMPLE)
        except OSError as error:
            (folder / _SAMPLE).unlink(missing_ok=True)
            trouble.append(f"no sample of its Python stacks: {error}")
        patience_s = _ANSWER_S + _ANSWER_STEPS * action.profile.found.step_s
        wrong = "it is not its host's first rank" if pid != first else ""
        wrong = wrong or await self._have_profiled(pid, folder, patience_s)
        found = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        if wrong or not any(name != _SAMPLE for name in found):
            trouble.append(f"no TensorFlow profile: {wrong or 'it is empty'}")
        if found:
            report = json.dumps(report_of(action, found, trouble), indent=2)
            (folder / _REPORT).write_text(f"{report}\n", encoding="utf-8")
        return found, trouble

    async def _have_profiled(self, pid: int, folder: Path, patience_s: float) -> str:
        """Have the worker profile its next steps; why it did not, empty where it did."""
        self._answered.clear()
        number = self._link.ask_for_profile(str(folder), STEPS, STEPS_S)
        for _ in range(int(patience_s / _LOOK_EVERY_S)):
            if not self._link.has_worker or self._link.progress().pid != pid:
                return "the worker has ended"
            try:
                async with asyncio.timeout(_LOOK_EVERY_S):
                    await self._answered.wait()
            except TimeoutError:
                continue
            self._answered.clear()
            if self._said.get("number") == number:
                return str(self._said.get("error") or "")
        return f"no answer within {patience_s:.0f} s"

    async def _store(self, folder: Path, files: list[str]) -> None:
        """Copy them to the store, where there is one."""
        for name in files:
            file = folder / name
            if file.stat().st_size > FILE_BYTES_MAX:
                self._log(f"{file} is too large for the store: it is kept here alone")
                continue
            place = f"{self._place}/{folder.name}/{name}"
            try:
                reply = await self._storing.ask({"command": "note", "place": place, "file": str(file)})
            except UploaderGone:
                return
            if not reply.get("ok"):
                self._log(f"{file} is not in the store: {reply.get('error')}: {reply.get('detail')}")


def report_of(action: ProfileWorker, files: list[str], trouble: list[str]) -> dict[str, object]:
    """What people want to know of the profiles beside it: who is slow, of what, by how much, and beside whom."""
    profile, is_slow = action.profile, action.host == action.profile.found.host
    return {
        "verdict": describe(profile.found),
        "this": {"host": action.host, "rank": action.rank, "is": "slow" if is_slow else "healthy"},
        "generation": action.generation,
        "asked_at": profile.at,
        "straggler": asdict(profile.found),
        "seconds_of_a_step": {profile.found.host: asdict(profile.split), profile.peer: asdict(profile.peer_split)},
        "peer": profile.peer,
        "files": files,
        "trouble": trouble,
    }
