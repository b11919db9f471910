"""The slabs that the agent has handed to this worker, and the writing of a snapshot into one of them."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Callable

from keepstep_worker import memory, pages
from keepstep_worker import wire as wires
from keepstep_worker.shares import beside
from keepstep_worker.slab import Layout, SlabError, Spec, Tensor, Writer
from keepstep_worker.slab_view import RestoreError, SlabView
from keepstep_worker.streaming import Copying
from keepstep_worker.wire import Seal, Wire

if TYPE_CHECKING:
    from concurrent.futures import Future

_STEP_RATIO = 0.3
"""What is copied beside a step may last so much of it: what a step changes before it is copied, TensorFlow copies, too,
and to memory that is new to it. Most steps change the state at their end."""
_BESIDE_BYTES_MIN = 8 << 20
"""What is smaller is copied in a millisecond or two: nothing is gained by a thread."""
_BESIDE = 2
"""So many times as long as one that is waited for a copy is taken to last beside a step, until one has."""


class Slabs:
    """All slabs known to this worker, of the newest layout and of earlier ones.

    Attributes:
        layout_number: the newest layout's number, 0 before the first.
    """

    def __init__(self, wire: Wire, generation: int) -> None:
        self._wire, self._generation = wire, generation
        self._descriptors: dict[int, int] = {}
        self._layout: Layout | None = None
        self._described: Sequence[Tensor] = ()
        self._answers: dict[int, frozenset[int]] = {}
        self._used: set[int] = set()
        self._writers: dict[int, Writer] = {}
        self._preparation: _Errand | None = None
        self._enlargement: _Errand | None = None
        self._read: frozenset[pages.Range] = frozenset()
        self._copy: Future[_Sealing] | None = None
        self._has_room = False
        self._ahead: tuple[int, SlabView] | None = None
        self._newest_sealed = wires.NO_SLAB
        self._copy_ns = 0
        self._sequence = max((seal.sequence for seal in wire.read_seals()), default=0)
        self.layout_number = 0

    def __contains__(self, slab: int) -> bool:
        return slab in self._descriptors

    def descriptor(self, slab: int) -> int:
        return self._descriptors[slab]

    def close(self) -> None:
        """Unmap and close every slab."""
        self._unmap()
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def adopt(self, message: dict[str, Any], descriptors: Sequence[int]) -> None:
        """Take over the slabs of a `slabs` message; a slab known already keeps its first descriptor."""
        described = message.get("slabs", [])
        for entry, descriptor in zip(described, descriptors):
            slab = int(entry["slab"])
            if slab in self._descriptors:
                os.close(descriptor)
            else:
                self._descriptors[slab] = descriptor
        for descriptor in descriptors[len(described) :]:
            os.close(descriptor)
        if "layout" in message:
            layout, slabs = int(message["layout"]), frozenset(int(entry["slab"]) for entry in described)
            self._answers[layout] = slabs
            if layout == self.layout_number:
                self._prepare(slabs)

    def layout_of(self, tensors: Sequence[Tensor]) -> Layout | None:
        """Make the layout of these tensors the current one; return it where it is new."""
        before, self._described = self._described, tensors
        if self._layout is not None and before is not tensors and _are_alike(before, tensors):
            return None
        specs: tuple[Spec, ...] = tuple([tensor[:3] for tensor in tensors])
        if self._layout is not None and self._layout.specs == specs:
            return None
        self._unmap()
        self._layout = Layout(specs)
        self.layout_number = self._layout.number
        return self._layout

    @property
    def awaited(self) -> bool:
        """Whether the current layout's slabs have not come yet."""
        return self._layout is not None and self.layout_number not in self._answers

    def answered(self, layout: int) -> bool:
        """Tell whether the agent has handed over the slabs of a layout."""
        return layout in self._answers

    def lacks(self, layout: int) -> bool:
        """Tell whether the answer was that there is no memory for a layout's slabs."""
        return self._answers.get(layout) == frozenset()

    def used(self, layout: int) -> bool:
        """Tell whether a grant for this layout was waited for or used before; says so from now on."""
        before = layout in self._used
        self._used.add(layout)
        return before

    def granted(self, grant: int, layout: int, prepared: bool) -> int | None:
        """Return the slab to write to, None where the grant is used up or is none of this layout's.

        Args:
            prepared: only where the copy meets no page fault: until then a snapshot would take several times as long.
        """
        if grant == self._newest_sealed or grant not in self._answers.get(layout, ()):
            return None
        return None if prepared and self._preparation is not None and self._preparation.is_alive() else grant

    def view(self, slab: int, step: int) -> SlabView:
        """Open a sealed slab for reading.

        Raises:
            RestoreError: it is not sealed for this step, or is no valid slab.
        """
        ahead, self._ahead = self._ahead, None
        try:
            size_bytes = self._sealed(slab, step).size_bytes
            if ahead is not None and (ahead[0], ahead[1].step) == (slab, step):
                return ahead[1]
            return SlabView.open(self._descriptors[slab], size_bytes, step)
        except SlabError as error:
            raise RestoreError(f"slab {slab} of step {step}: {error}") from error

    def map_in(self, slab: int, step: int) -> None:
        """Have a slab that will be read mapped in, beside what the script does until then."""
        with contextlib.suppress(KeyError, RestoreError):  # whoever reads it is told
            view = self.view(slab, step)
            self._ahead = slab, view
            _Errand("keepstep-ahead", view.map_in).start()

    def to_leave(self, step_ns: int, every: int) -> int:
        """Of a snapshot's bytes, how many are better copied beside the next step, where steps take so long.

        None of the first one, by which it is known how long a copy takes, none where the next step has a snapshot, too,
        and none where there is no memory for what that step changes meanwhile.
        """
        assert self._layout is not None, "a layout comes before its slabs"
        size_bytes = self._layout.size_bytes
        if every <= 1 or not self._copy_ns:
            return 0
        leaves = min(size_bytes, int(size_bytes * _STEP_RATIO * step_ns / self._copy_ns))
        if leaves < _BESIDE_BYTES_MIN:
            return 0
        self._has_room = self._has_room or memory.has_room(size_bytes)
        return leaves if self._has_room else 0

    def seal(self, slab: int, tensors: Sequence[Tensor], step: int, left_bytes: int = 0) -> None:
        """Write the tensors into the slab and declare it sealed for `step`.

        Args:
            left_bytes: about so many may be copied beside the steps that follow; then it is sealed when they are, and
                `copied` tells.
        """
        assert self._copy is None, "one after the other"
        sealing = self._begin(slab, step)
        copying = sealing.perform(tensors, left_bytes)
        if self._enlargement is None:
            self._enlarge(frozenset(copying.ranges))
        if copying.left_bytes:
            self._copy = beside(sealing.finish)
            copying.let_go()
        else:
            self._newest_sealed, self._copy_ns, self._has_room = slab, _BESIDE * sealing.took_ns, False

    @property
    def copying(self) -> bool:
        """Whether `seal` has left something, and `copied` has not yet said what came of it."""
        return self._copy is not None

    def copied(self, wait: bool) -> _Sealing | None:
        """Return what was left and is sealed now; None while it is copied, unless that is waited for.

        Raises:
            Exception: whatever kept it from being written.
        """
        copy = self._copy
        if copy is None or not (wait or copy.done()):
            return None
        begun_ns, self._copy = time.monotonic_ns(), None
        sealing: _Sealing = copy.result()
        sealing.cost_ns += time.monotonic_ns() - begun_ns
        self._newest_sealed, self._copy_ns, self._has_room = sealing.seal.slab, sealing.took_ns, sealing.had_room
        return sealing

    # --- inside ------------------------------------------------------------------------------------------------------

    def _sealed(self, slab: int, step: int) -> Seal:
        seal = next((seal for seal in self._wire.read_seals() if seal.slab == slab), None)
        if seal is None or seal.step != step:
            raise SlabError(f"it is sealed for step {seal.step if seal else None}, ordered was step {step}")
        return seal

    def _begin(self, slab: int, step: int) -> _Sealing:
        layout = self._layout
        assert layout is not None, "a layout comes before its slabs"
        writer = self._writer(slab, layout)
        self._wire.clear_seal(slab)
        self._sequence += 1
        seal = Seal(slab, step, self._sequence, layout.size_bytes, layout.number, self._generation, 0)
        return _Sealing(self._wire, writer, seal)

    def _writer(self, slab: int, layout: Layout) -> Writer:
        writer = self._writers.get(slab)
        if writer is None:
            writer = self._writers[slab] = Writer(self._descriptors[slab], layout)
        return writer

    def _prepare(self, slabs: Iterable[int]) -> None:
        assert self._layout is not None, "its number was answered"
        if self._preparation is not None:  # the answer was corrected
            self._preparation.end()
        writers = [self._writer(slab, self._layout) for slab in sorted(slabs)]
        self._preparation = _Errand("keepstep-slabs", functools.partial(_populate, writers))
        self._preparation.start()

    def _enlarge(self, read: frozenset[pages.Range]) -> None:
        """Have huge pages for what lies where it lay at the snapshot before: it will be read there again and again."""
        before, self._read = self._read, read
        if before:
            self._enlargement = _Errand("keepstep-pages", functools.partial(pages.enlarge, before & read))
            self._enlargement.start()
            self._read = frozenset()

    def _unmap(self) -> None:
        if self._copy is not None:
            self._copy.exception()
        for errand in (self._preparation, self._enlargement):
            if errand is not None:
                errand.end()
        self._preparation = self._enlargement = None
        self._read = frozenset()
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()


class _Sealing:
    """A slab that is being written.

    Attributes:
        seal: what is declared once it is.
        took_ns: how long that took; where something was left, how long all of it would have taken beside the steps.
        cost_ns: of what was left: its processor time over the cores, and how long the training waited for it.
        had_room: whether there was memory for more behind that.
    """

    def __init__(self, wire: Wire, writer: Writer, seal: Seal) -> None:
        self._wire, self._writer = wire, writer
        self.seal, self.took_ns, self.cost_ns, self.had_room = seal, 0, 0, False

    def perform(self, tensors: Sequence[Tensor], left_bytes: int) -> Copying:
        """Write it, and seal it unless something is left."""
        begun_ns = time.monotonic_ns()
        self._copying = self._writer.write(tensors, left_bytes)
        if not self._copying.left_bytes:
            self.took_ns = self._declare() - begun_ns
        return self._copying

    def finish(self) -> _Sealing:
        """Copy what is left, beside others that do, and seal it."""
        begun_ns, used_ns = time.monotonic_ns(), time.thread_time_ns()
        left_bytes, threads = self._copying.left_bytes, self._copying.threads
        self._copying.finish()
        self.took_ns = (self._declare() - begun_ns) * self.seal.size_bytes // left_bytes
        self.cost_ns = (time.thread_time_ns() - used_ns) * threads // len(os.sched_getaffinity(0))
        self.had_room = memory.has_room(self.seal.size_bytes)
        return self

    def _declare(self) -> int:
        sealed_ns = time.monotonic_ns()
        self._wire.write_seal(self.seal._replace(sealed_ns=sealed_ns))
        return sealed_ns


def _are_alike(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether they have the same specs; most are the very same tensors, which need not be looked into."""
    return len(some) == len(others) and all(a is b or a[:3] == b[:3] for a, b in zip(some, others))


def _populate(writers: Sequence[Writer], go_on: Callable[[], bool]) -> None:
    for writer in writers:
        writer.populate(go_on)


class _Errand(threading.Thread):
    """Something that is done about this process's memory while the training goes on."""

    def __init__(self, name: str, work: Callable[[Callable[[], bool]], None]) -> None:
        """Prepare it.

        Args:
            work: given what tells whether to go on.
        """
        super().__init__(name=name, daemon=True)
        self._work, self._stopped = work, threading.Event()

    def run(self) -> None:
        self._work(lambda: not self._stopped.is_set())

    def end(self) -> None:
        """Return when it touches nothing any more."""
        self._stopped.set()
        self.join()
