"""A simulated script that says nothing and writes its own files, the folder it writes to, and who watches that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keepstep.core import actions as a
from keepstep.core import events as e
from keepstep.simulation.worker import SimWorker

if TYPE_CHECKING:
    from keepstep.simulation.host import SimHost

STEPS_A_FILE = 10
"""How many steps of a speaking script one file of a silent one stands for."""


class SilentWorker(SimWorker):
    """Goes on from the newest number in its folder and writes the next ones, each rank for itself."""

    written = 0

    def _join(self) -> None:
        self.written = self.host.shelf.folder
        self.host.world.checkers.goes_on(self)
        self._after(self.random.uniform(0.2, 3.0), self._write)

    def look(self) -> None:
        """It does not read orders."""

    def _write(self) -> None:
        world = self.host.world
        if world.clock.now < self.frozen_until:
            self._after(self.frozen_until - world.clock.now, self._write)
            return
        if self.written >= world.last_step // STEPS_A_FILE:
            self.returns()
            return
        self.written += 1
        self.host.shelf.folder = self.written
        self.host.uploader.wrote()
        self._after(self.random.uniform(0.5, 5.0), self._write)


class SimFiling:
    """Watches one host's folder. What it has copied goes with the agent that it belongs to."""

    def __init__(self, host: SimHost) -> None:
        self._host = host
        self._life = self._edition = self._copied = 0

    def wrote(self) -> None:
        """The script has written; it is seen a while later."""
        host, life = self._host, self._host.life

        def look() -> None:
            if host.life == life and not host.uploader_down and self._look():
                host.post(e.FilesCopied(self._edition, (str(self._copied),)))

        host.world.clock.after(host.random.uniform(0.05, 3.0), look)

    def settle(self, action: a.SettleFiles) -> e.Event:
        self._look()
        return e.FilesSettled(action.operation, action.mark, self._edition)

    def keep(self, action: a.KeepFiles) -> e.Event:
        """Commit what was copied last; half of the answers may get lost."""
        world = self._host.world
        self._look()
        kept = world.store.keep_files(action.generation, self._copied)
        if kept is not None:
            world.checkers.kept(self._host, action.generation, kept)
        if world.store.loses_answers and self._host.random.random() < 0.5:
            return e.OperationFailed(action.operation, "no answer", 1.0)
        if kept is None:
            return e.CommitRefused(action.operation, action.generation, 0)
        return e.FilesKept(action.operation, self._edition, f"files/{kept}", kept, 1, 0.1)

    def put_back(self, action: a.PutBackFiles) -> e.Event:
        shelf = self._host.shelf
        if action.manifest:
            kept = self._host.world.store.file_of(action.manifest)
            shelf.folder = max(shelf.folder, kept) if action.own else kept
        self._look()
        return e.FilesPutBack(action.operation, action.generation, self._edition, 1, 0)

    def _look(self) -> bool:
        """Copy what is there; whether it is another edition."""
        if self._life != self._host.life:
            self._life, self._edition, self._copied = self._host.life, 0, 0
        if self._host.shelf.folder in (0, self._copied):
            return False
        self._edition, self._copied = self._edition + 1, self._host.shelf.folder
        return True
