"""The worker's side of the protocol: where the training stands, snapshots, and the exact drain.

A session is used from the thread that trains, and by one training at a time. Every method that moves the training on
may block (a drain, a slab not granted yet); once a drain step is sealed, control never returns to the caller: the agent
ends the process.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from keepstep_worker import identity as identities
from keepstep_worker import inquiry, probe, rank, soundness
from keepstep_worker import wire as wires
from keepstep_worker.channel import Channel, ChannelClosed
from keepstep_worker.fingerprint import Fingerprints
from keepstep_worker.identity import Identity
from keepstep_worker.profiling import Profiler
from keepstep_worker.slab import Tensor
from keepstep_worker.slab_view import RestoreError, SlabView
from keepstep_worker.snapshots import Slabs
from keepstep_worker.wire import Orders, Progress, StepTimes, Wire

Provider = Callable[[], Sequence[Tensor]]

_POLL_S = 0.02
"""How often orders are read again while waiting; a message wakes the wait earlier."""
_ANSWER_S = 0.1
"""How long a worker that has nothing else to do yet waits for the slab: it may come later."""
_FIRST_GRANT_NS = 1_000_000_000
_FOLLOWS_NS = 900_000_000_000
"""How long a rank waits for the first one of its host, whose state it is to go on from."""
_EXIT_ORPHANED = 143
_NO_TIMES = StepTimes()
_current: Session | None = None


class Session:
    """One worker's dealings with its agent, from hello to the last step."""

    def __init__(self, wire: Wire, channel: Channel, identity: Identity) -> None:
        """Say hello: publish the phase and tell the agent this process's id."""
        self.identity = identity
        self._wire, self._channel, self.pid = wire, channel, os.getpid()
        self._phase = wires.PHASE_HELLO
        self._published = self._ring_sequence = 0
        self.entered_step = self.completed_step = self.last_step = self._unproven = 0
        self.snapshot_ns = self._stall_ns = self.skipped = self.start_ns = 0
        self._sealed_step = -1
        self._provider: Provider | None = None
        self._slabs = Slabs(wire, identity.generation)
        self._profiler = Profiler(wire.read_orders().profile, self.tell)
        self._fingerprints = Fingerprints(self.tell)
        self._restore_begun_ns = time.monotonic_ns()
        self._publish()
        self.tell({"kind": "hello", "version": wires.VERSION, "pid": self.pid})
        inquiry.offer(self._channel, lambda: self.start_ns)
        if self.goes_on():  # the slab comes as the answer to a hello
            self._receive(_ANSWER_S)
            self._slabs.map_in(self._orders().restore_slab, self._orders().restore_step)

    @classmethod
    def current(cls) -> Session | None:
        """Return this process's session, opened on first use; None outside keepstep and in forked children."""
        global _current
        if _current is None and identities.is_worker():
            wire_fd, socket_fd = identities.read_descriptors()
            for name in identities.DESCRIPTOR_VARIABLES:
                del os.environ[name]
            os.set_inheritable(wire_fd, False)
            _current = cls(Wire(wire_fd), Channel.from_fd(socket_fd), identities.read_identity())
        if _current is not None and _current.pid != os.getpid():
            return None
        return _current

    def close(self) -> None:
        """Give the descriptors back; a worker that ends need not call it."""
        self._slabs.close()
        self._channel.close()
        self._wire.close()

    def tell(self, message: dict[str, Any], hint: bool = False) -> None:
        """Tell the agent something that needs no answer; its `kind` says what, and a hint may get lost."""
        with contextlib.suppress(ChannelClosed):  # the end of this process is near; what waits for an answer finds out
            self._channel.send(message, hint)

    def is_to_hold(self) -> bool:
        """Whether the agent wants no step entered beyond one that it names."""
        return bool(self._orders().hold)

    def goes_on(self) -> bool:
        """Whether there is a state to go on from, as on all ranks of this world or on none."""
        return self._orders().restore_slab != wires.NO_SLAB

    # --- before the first step ---------------------------------------------------------------------------------------

    def join(self, kind: str, last_step: int = 0) -> None:
        """Declare that steps will be reported.

        Args:
            kind: who reports them: keras3, tf_keras or loop.
            last_step: the last step that this training will execute, 0 where unknown.
        """
        self._phase, self.last_step = wires.PHASE_JOINED, last_step
        self._publish()
        self.tell({"kind": "joined", "how": kind, "last_step": last_step})

    def restored(self) -> SlabView | None:
        """Return the state to go on from, None for a fresh start. Waits for the agent to hand the slab over.

        Raises:
            RestoreError: what was handed over is not sealed for the step that the agent ordered.
        """
        self._restore_begun_ns = time.monotonic_ns()
        give_up_ns = self._restore_begun_ns + _FOLLOWS_NS
        while self._wire.read_orders().generation != self.identity.generation:
            if self.identity.local_rank > 0 and time.monotonic_ns() > give_up_ns:
                raise RestoreError("the first rank of this host has not said what it restores: have all ranks do so")
            self._receive()
        orders = self._orders()
        if orders.restore_slab == wires.NO_SLAB:
            rank.tell_restored(wires.NO_SLAB, 0, 0)
            return None
        while orders.restore_slab not in self._slabs:
            self._receive()
        slab, step = orders.restore_slab, orders.restore_step
        view = self._slabs.view(slab, step)
        rank.tell_restored(self._slabs.descriptor(slab), step, view.memory.nbytes)
        return view

    def restoration_done(self, step: int, begun_ns: int | None = None, data_ns: int = 0) -> None:
        """Declare that the script's state is that of `step`.

        Args:
            step: the newest completed step.
            begun_ns: when putting it back began, monotonic nanoseconds; None where `restored()` was called for that.
            data_ns: nanoseconds of it that went into reading data up to that step.
        """
        self.entered_step = self.completed_step = self._sealed_step = self._unproven = step
        self._publish()
        seconds = (time.monotonic_ns() - (self._restore_begun_ns if begun_ns is None else begun_ns)) / 1e9
        message = {"kind": "restored", "step": step, "seconds": round(seconds, 6)}
        self.tell({**message, "data_s": round(data_ns / 1e9, 6)} if data_ns else message)

    def set_provider(self, provider: Provider | None) -> None:
        """Register what returns the tensors to save, always of the moment it is called at; None to take it away."""
        self._provider = provider

    def announce(self) -> None:
        """Tell the agent the layout now, so that slabs are ready by the first snapshot. Optional; does not wait."""
        if self._provider is not None:
            self._announce(self._provider())

    # --- steps -------------------------------------------------------------------------------------------------------

    def enter_step(self, step: int, last_step: int | None = None) -> None:
        """Declare that `step` is about to be executed, and wait where the agent wants it.

        Args:
            step: the step, counted from 1; of several executed in one go, the last.
            last_step: the last step of the training, where it is known better by now.
        """
        self.entered_step, self.start_ns = step, 0
        if last_step is not None:
            self.last_step = last_step
        self._publish()
        orders = self._orders()  # read after publishing, so that agent or worker sees the other's word
        if orders.hold:
            self._hold(step)
        if orders.profile > self._profiler.number:
            self._profiler.number = orders.profile
        if orders.fingerprint > self._fingerprints.told:
            self._fingerprints.enter(orders.fingerprint, self.completed_step, step)
        if self._slabs.copying and self._is_due(step, self.completed_step, orders):
            self._settle(wait=True)  # others write their next one over the one before: this one must be had by then
        self.start_ns = time.monotonic_ns()

    def complete_step(self, step: int, times: StepTimes = _NO_TIMES) -> None:
        """Declare that `step` was executed; takes a snapshot where one is due.

        Args:
            step: the step, counted from 1; of several executed in one go, the last.
            times: what was measured; what is 0 is filled in, gradients only where a probe has seen them.

        Raises:
            Unsound: it is the first one from a state that was restored, and has made NaN of what is trained.
        """
        start_ns = times.start_ns or self.start_ns
        end_ns = times.end_ns or probe.returned_ns(start_ns) or time.monotonic_ns()
        if self._profiler.number != self._profiler.finished:
            end_ns = self._profile(step)
        record = probe.record_of(self._ring_sequence + 1, step, times._replace(start_ns=start_ns, end_ns=end_ns))
        self._fingerprints.complete(step)
        if self._unproven and self._provider is not None:
            soundness.demand(self._provider(), step, self._unproven)
            self._unproven = 0
        previous, self.completed_step = self.completed_step, step
        self._phase = wires.PHASE_JOINED
        self._ring_sequence += 1
        self._wire.append(record)
        self._publish()
        if self._slabs.awaited:
            self._poll()
        orders = self._orders()
        if orders.hold:
            self._hold(step + 1)
            orders = self._orders()
        self._settle()
        if self._is_due(step, previous, orders):
            # the last one must be had on all ranks, and of this very moment: what comes behind it changes the position
            self._snapshot(forced=0 < self.last_step <= step)

    def hold(self) -> None:
        """Wait where the agent wants it, before something that takes long and is no step."""
        self._hold(self.completed_step + 1)

    def turn_to(self, phase: int) -> None:
        """Declare what the time until the next step, or (PHASE_EPOCH) that step itself, is spent on.

        Saying it once more is a sign that it gets on.
        """
        self._phase = phase
        self._publish()

    def leave_step(self) -> int:
        """Declare that the step which was entered, if any, will not be executed: there was nothing left to do in it.

        Where the agent has been told of it already, all may have been ordered to stop at this very step; then it
        counts as completed, with nothing done in it.

        Returns:
            The completed step.
        """
        entered, self.entered_step = self.entered_step, self.completed_step
        self._publish()
        orders = self._orders()  # read after publishing, so that a later hold finds the step gone
        while orders.hold and orders.drain_step == 0 and entered > self.completed_step:
            self._receive()
            orders = self._orders()
        if orders.hold and orders.drain_step == entered > self.completed_step:
            self.entered_step = self.completed_step = entered
            self._publish()
        return self.completed_step

    def finish(self, whole: bool = True) -> None:
        """Declare that there will be no further step: seal the last one, then let the script run on to its end.

        Args:
            whole: False where a step was begun and given up, so that the state is no step's.
        """
        orders = self._orders()
        if orders.hold and whole:
            self._hold(self.completed_step + 1)
        self._settle(wait=True)
        if self._sealed_step != self.completed_step and orders.snapshot_every > 0 and whole:
            self._snapshot(forced=True)
        self._profiler.close()
        self._phase = wires.PHASE_FINISHED
        self._publish()
        if self._orders().hold and whole:
            self._hold(self.completed_step + 1)

    def drained(self) -> NoReturn:
        """Declare that the drain step is sealed, and never return: the agent ends this process."""
        self._phase = wires.PHASE_DRAINED
        self._publish()
        sealed = self._sealed_step == self.completed_step
        self.tell({"kind": "drained", "step": self.completed_step, "sealed": sealed})
        while True:
            self._receive(None)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _hold(self, next_step: int) -> None:
        """Wait until the drain step is known. Return if `next_step` is to be executed, else seal and never return."""
        while True:
            orders = self._orders()
            if not orders.hold or orders.drain_step >= next_step:
                return
            if orders.drain_step > 0:
                self._settle(wait=True)
                if self._sealed_step != self.completed_step:
                    self._snapshot(forced=True)
                self.drained()
            self._receive()

    def _is_due(self, step: int, previous: int, orders: Orders) -> bool:
        """Whether there is to be a snapshot of a step that comes behind `previous`."""
        every = orders.snapshot_every
        return every > 0 and (0 < self.last_step <= step or step // every > previous // every)

    def _settle(self, wait: bool = False) -> None:
        """Tell of the snapshot whose rest was copied beside the steps, if it is sealed; `wait` until it is."""
        copied = self._slabs.copied(wait)
        if copied is not None:
            self.snapshot_ns = self._stall_ns + copied.cost_ns
            self._tell_sealed(copied.seal.slab, copied.seal.step)

    def _snapshot(self, forced: bool) -> None:
        """Seal the state of this moment: at once where `forced`, else in part beside the next step if it can be."""
        if self._provider is None:
            return
        self._settle(wait=forced)
        if self._slabs.copying:
            self._skip()
            return
        begun_ns = time.monotonic_ns()
        tensors = self._provider()
        layout = self._announce(tensors)
        ready_ns = time.monotonic_ns()
        slab = self._granted(layout, forced)
        if slab is None:
            self._skip()
            return
        waited_ns = time.monotonic_ns() - ready_ns  # seldom, and no measure of what the next snapshot will cost
        every = self._orders().snapshot_every
        leaves = 0 if forced else self._slabs.to_leave(begun_ns - self.start_ns, every)
        self._slabs.seal(slab, tensors, self.completed_step, leaves)
        self._stall_ns = time.monotonic_ns() - begun_ns - waited_ns
        if not self._slabs.copying:
            self.snapshot_ns = self._stall_ns
            self._tell_sealed(slab, self.completed_step)

    def _granted(self, layout: int, patient: bool) -> int | None:
        """The slab to write to, None where there is none yet; a patient one waits for it."""
        while not self._slabs.answered(layout):
            self._receive()
        self._poll()
        # a layout's first slabs and their first grant come by different ways: either may be first
        patient_until_ns = 0 if self._slabs.used(layout) else time.monotonic_ns() + _FIRST_GRANT_NS
        while True:
            slab = self._slabs.granted(self._orders().grant, layout, prepared=not patient)
            waits = (patient or time.monotonic_ns() < patient_until_ns) and not self._slabs.lacks(layout)
            if slab is not None or not waits:
                return slab
            self._receive()

    def _skip(self) -> None:
        self.skipped += 1
        self._publish()

    def _tell_sealed(self, slab: int, step: int) -> None:
        self._sealed_step = step
        self._publish()
        self.tell({"kind": "sealed", "slab": slab, "step": step}, hint=True)

    def _profile(self, step: int) -> int:
        """Go on with the profile that was asked for; what it takes is no work of this rank's, but waiting."""
        if not self._profiler.is_told:
            self._poll()
        self._profiler.turn(step)
        return time.monotonic_ns()

    def _announce(self, tensors: Sequence[Tensor]) -> int:
        layout = self._slabs.layout_of(tensors)
        if layout is not None:
            self.tell({"kind": "layout", "layout": layout.number, "bytes": layout.size_bytes})
        return self._slabs.layout_number

    def _orders(self) -> Orders:
        orders = self._wire.read_orders()
        return orders if orders.generation == self.identity.generation else Orders()

    def _publish(self) -> None:
        self._published += 1
        self._wire.write_progress(Progress(
            self._published, self.identity.generation, self._phase, self.pid, self.entered_step,
            self.completed_step, self.last_step, self.snapshot_ns, self.skipped,
        ))  # fmt: skip

    def _poll(self) -> None:
        """Take in what the agent has sent already."""
        while self._receive(0.0):
            pass

    def _receive(self, timeout_s: float | None = _POLL_S) -> bool:
        try:
            received = self._channel.receive(timeout_s)
        except ChannelClosed:
            os._exit(_EXIT_ORPHANED)
        if received is None:
            return False
        message, descriptors = received
        if message.get("kind") == "slabs":
            self._slabs.adopt(message, descriptors)
        else:
            if message.get("kind") == "profile":
                self._profiler.take(message)
            for descriptor in descriptors:
                os.close(descriptor)
        return True
