"""This host's GPUs: what is known of them, which verdict it comes to, and what follows from that.

A GPU is fine; or it is strained, which is told with the host's status; or it has a fault, and is not trained on any
more. README.md has the table. Nothing here knows a clock or NVML: samples are facts, told where they are new.
"""

from __future__ import annotations

from keepstep.core import elastic, health
from keepstep.core.actions import KeepCordons
from keepstep.core.causes import FailureCause
from keepstep.core.facts import GpuFault, GpuView, Growth, Recovery
from keepstep.core.gpu_events import CordonsKept, CordonsRead, GpuSample, GpusSampled, KeptCordon
from keepstep.core.health_events import StrainsChanged
from keepstep.core.health_knobs import Gpu
from keepstep.core.reasons import Reason
from keepstep.core.records import CordonRecord, Failure, GenerationRecord, Member, Phase
from keepstep.core.state import State, Turn
from keepstep.core.values import evolve

HEALTH = "health"
"""Who cordons a host where no operator does."""

KEEPING = "cordons"
"""The operation by which the store's list is kept."""

HOT_READINGS = 3
GROWS_S = 300.0
"""A counter that has not moved for so long grows no more."""

FOREIGN_BYTES_MIN = 256 << 20
"""What tools that look at a GPU hold of its memory is nobody's concern."""

SLOWDOWNS = ("hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake")
"""The power cap is not among them: under load a GPU is there always."""

_SILENT = "the GPU driver does not answer"
_UNNAMED = "index-"
_EVIDENCE_MAX = 500
_XIDS = {
    48: "a memory error that could not be corrected",
    63: "a memory row is to be remapped, or a page retired",
    64: "a memory row could not be remapped, or a page not retired",
    74: "an NVLink failed",
    79: "it has fallen off the bus",
    94: "a memory error that was contained",
    95: "a memory error that was not contained",
}
"""Source: NVIDIA, "XID Errors", in words of our own."""

_COUNTERS = {
    "ecc_corrected": "corrected memory errors",
    "link_errors": "NVLink errors",
    "pcie_replays": "PCIe replays",
    "retired_pages": "retired memory pages",
}


# --- what is told ----------------------------------------------------------------------------------------------------


def on_gpus_sampled(turn: Turn, event: GpusSampled) -> None:
    """Some GPUs have something new to tell, or their driver has nothing to tell any more."""
    gpus = turn.state.gpus
    seen, faults, forgiven = dict(gpus.seen), list(gpus.faults), gpus.forgiven
    for sample in event.gpus:
        before = seen.get(sample.uuid)
        view = seen[sample.uuid] = _view_after(before, sample, turn.state.policy.health.gpu, turn.now)
        lasting = _lasting(view, turn.state.policy.health.gpu)
        forgiven = tuple(key for key in forgiven if not key.startswith(f"{sample.uuid} ") or key in lasting)
        found = {key: text for key, text in lasting.items() if key not in forgiven}
        found |= _sudden(before, sample, turn.state.policy.health.gpu)
        known = {fault.key for fault in faults}
        for key, text in found.items():
            if key not in known:
                faults.append(GpuFault(sample.uuid, key, text, turn.now))
                turn.because(Reason.GPU_FAULT, f"{sample.uuid}: {text}")
    turn.set(gpus=evolve(gpus, seen=seen, silent=event.silent, faults=tuple(faults), forgiven=forgiven))


def _view_after(before: GpuView | None, sample: GpuSample, knobs: Gpu, now: float) -> GpuView:
    """What is known of a GPU after one more sample."""
    is_hot = sample.temperature_c is not None and sample.temperature_c > knobs.temperature_max
    if before is None:
        return GpuView(sample, sample.links_down or 0, int(is_hot))
    grown = dict(before.grown)
    for name in _COUNTERS:
        old, new = getattr(before.sample, name), getattr(sample, name)
        if old is not None and new is not None and new > old:
            so_far = grown[name].count if name in grown else 0
            grown[name] = Growth(so_far + new - old, now)
    return GpuView(sample, before.links_down, before.hot + 1 if is_hot else 0, grown)


def _lasting(view: GpuView, knobs: Gpu) -> dict[str, str]:
    """The faults that a GPU shows for as long as it has them: what each is known by, and in words."""
    sample, found = view.sample, {}
    if sample.lost:
        found["lost"] = "the driver has lost it"
    if sample.recovery:
        found[f"recovery {sample.recovery}"] = f"the driver wants it repaired: {sample.recovery.replace('_', ' ')}"
    if sample.remap_failed:
        found["remap"] = "a memory row could not be remapped"
    if view.hot >= HOT_READINGS:
        found["hot"] = (
            f"{sample.temperature_c:g} degrees Celsius, and more than {knobs.temperature_max:g} on {HOT_READINGS} "
            "readings in a row"
        )
    return {f"{sample.uuid} {key}": text for key, text in found.items()}


def _sudden(before: GpuView | None, sample: GpuSample, knobs: Gpu) -> dict[str, str]:
    """The faults that a GPU shows once."""
    found = {}
    for xid in sample.xids:
        if xid in knobs.fatal_xids:
            found[f"xid {xid}"] = f"Xid {xid}" + (f", {_XIDS[xid]}" if xid in _XIDS else "")
    old, new = None if before is None else before.sample.ecc_uncorrected, sample.ecc_uncorrected
    if old is not None and new is not None and new > old:
        found["ecc"] = f"{new - old} memory errors that could not be corrected"
    return {f"{sample.uuid} {key}": text for key, text in found.items()}


def on_cordons_read(turn: Turn, event: CordonsRead) -> None:
    """The store's list, as an earlier run has left it: what of it concerns this host is seen once its GPUs are."""
    turn.set(gpus=evolve(turn.state.gpus, listed=event.cordons))


def on_cordons_kept(turn: Turn, event: CordonsKept) -> None:
    """The store's list is as it was to be."""
    turn.landed(event.operation)
    gpus = turn.state.gpus
    lifted = tuple(what for what in gpus.lifted if what in gpus.asked)  # meanwhile: that is still to be told
    turn.set(gpus=evolve(gpus, kept=gpus.asked, lifted=lifted))


def on_uncordoned(turn: Turn, host: str) -> None:
    """A cordon was lifted: where it is this host's, what it was for is forgiven, and no list has it any more.

    An edge, not a level: that the record is absent could mean as well that etcd has lost its data.
    """
    state = turn.state
    if host != state.job.host:
        return
    lasting = [key for view in state.gpus.seen.values() for key in _lasting(view, state.policy.health.gpu)]
    own = _own(state)
    listed = tuple(entry for entry in state.gpus.listed if entry.what not in own)
    turn.set(gpus=evolve(state.gpus, faults=(), forgiven=tuple(lasting), listed=listed, lifted=own))
    if state.failure is not None and state.failure.cause is FailureCause.GPU_FAULT:
        turn.set(failure=None)
    turn.because(Reason.CORDON_LIFTED, host)


# --- what follows ----------------------------------------------------------------------------------------------------


def judge(turn: Turn) -> None:
    """Tell what strains this host's GPUs, and see to it that nobody trains on one that has a fault."""
    gpus = turn.state.gpus
    if not (gpus.seen or gpus.silent or gpus.listed or turn.state.cluster.cordons or gpus.lifted):
        return
    strains = _strains(turn)
    if strains != turn.state.strains.get("gpu", ()):
        health.on_strains_changed(turn, StrainsChanged("gpu", strains))
    _keep(turn)
    _answer(turn)


def _strains(turn: Turn) -> tuple[str, ...]:
    """What holds this host's GPUs up, or bodes ill, in words."""
    gpus = turn.state.gpus
    found = [_SILENT] if gpus.silent else []
    for uuid, view in gpus.seen.items():
        found += [f"{uuid}: {text}" for text in _strains_of(turn, view)]
    return tuple(found)


def _strains_of(turn: Turn, view: GpuView) -> list[str]:
    sample, found = view.sample, []
    slowed = [reason.replace("_", " ") for reason in sample.throttle if reason in SLOWDOWNS]
    if slowed:
        clocks = f", {sample.clock_mhz} of {sample.clock_max_mhz} MHz" if sample.clock_mhz else ""
        found.append(f"clocks held down by {', '.join(slowed)}{clocks}")
    if view.hot:
        found.append(f"{sample.temperature_c:g} degrees Celsius")
    if (sample.links_down or 0) > view.links_down:
        found.append(f"NVLinks down: {(sample.links_down or 0) - view.links_down}")
    if (sample.foreign_bytes or 0) >= FOREIGN_BYTES_MIN:
        found.append(f"{(sample.foreign_bytes or 0) / 1e9:.1f} GB of its memory held by processes of others")
    if sample.repair_pending:
        found.append("a repair of its memory waits for a reset")
    for name, growth in view.grown.items():
        if turn.now < growth.at + GROWS_S:
            found.append(f"{_COUNTERS[name]} grow, {growth.count} so far")
            turn.wake(growth.at + GROWS_S)
    return found


def _named(state: State) -> tuple[str, ...]:
    """The GPUs of this host that are known by name."""
    return tuple(uuid for uuid in state.gpus.seen if not uuid.startswith(_UNNAMED))


def _own(state: State) -> tuple[str, ...]:
    """All that the store's list may know this host by: its GPUs and its machine."""
    return tuple(filter(None, [*_named(state), state.job.machine]))


def _found(state: State) -> tuple[KeptCordon, ...]:
    """What an earlier run has left in the store's list of this host."""
    own = _own(state)
    return tuple(entry for entry in state.gpus.listed if entry.what in own)


def _why(state: State) -> str:
    """What this host is not to train for; empty where nothing is known against it."""
    if state.gpus.faults:
        return "; ".join(f"{fault.gpu}: {fault.text}" for fault in state.gpus.faults)[:_EVIDENCE_MAX]
    found = _found(state)
    return "; ".join(f"{each.what} is cordoned by {each.by}: {each.why}" for each in found)[:_EVIDENCE_MAX]


def _keep(turn: Turn) -> None:
    """Have the store's list say what is cordoned here, and for whose sake, so that a later run knows it."""
    state, gpus = turn.state, turn.state.gpus
    if not state.job.has_store or turn.in_flight(KEEPING):
        return
    wanted, seen = {}, state.cluster.cordons.get(state.job.host)
    if seen is not None and seen.record.by != HEALTH:
        names = _named(state) or (state.job.machine,)
        wanted = dict.fromkeys(names, (seen.record.by, seen.record.why))
    for fault in gpus.faults:
        what = state.job.machine if fault.gpu.startswith(_UNNAMED) else fault.gpu
        wanted.setdefault(what, (HEALTH, fault.text))
    wanted.pop("", None)
    entries = tuple(
        KeptCordon(what, state.job.host, by, why, turn.now)
        for what, (by, why) in sorted(wanted.items())
        if what not in gpus.kept
    )
    lifted = tuple(what for what in gpus.lifted if what not in wanted)
    if entries or lifted:
        detail = ", ".join([*(entry.what for entry in entries), *(f"no more {what}" for what in lifted)])
        if turn.attempt(KeepCordons(KEEPING, entries, lifted), Reason.CORDON_KEPT, detail):
            turn.set(gpus=evolve(gpus, asked=tuple(sorted(wanted))))


def _answer(turn: Turn) -> None:
    """What is known against this host ends the world that it trains in, or keeps it out of the next one.

    A fault is this host's failure, and the policy says what to do about it. Where that is to go on, and where the host
    trains in no world yet, it cordons itself first: so whoever leads knows of both, or of the cordon alone.
    """
    state, generation = turn.state, turn.generation
    why, host = _why(state), state.job.host
    if not why or host not in state.job.trainers or turn.is_over:
        return
    has_fault, is_out = bool(state.gpus.faults), host in state.cluster.cordons
    trains = turn.is_member and generation is not None and generation.phase is not Phase.ENDED
    goes_on = state.policy.rule_for(FailureCause.GPU_FAULT, None).respond == "restart"
    if trains and generation is not None and state.done == generation.number:
        return  # it has done its part
    if not is_out and (goes_on or not has_fault or not trains):
        turn.put(CordonRecord(host, HEALTH, turn.now, why), Reason.HOST_CORDONED, why)
    elif has_fault and trains and generation is not None:
        _fail(turn, generation, why)


def _fail(turn: Turn, generation: GenerationRecord, why: str) -> None:
    """Make the fault this host's failure; what its worker died of meanwhile came of it."""
    state, known = turn.state, turn.state.failure
    number = generation.number if generation.phase is Phase.READY else generation.number - 1
    at = min(fault.at for fault in state.gpus.faults)
    if known is not None:
        if known.cause is FailureCause.GPU_FAULT and known.message == why:
            return
        at, number = min(at, known.at), max(number, state.failure_generation)
    step = max((worker.entered for worker in state.workers), default=state.completed)
    rank = generation.rank_of(state.job.host)
    failure = Failure(FailureCause.GPU_FAULT, state.job.host, at, rank, step, message=why)
    turn.set(failure=failure, failure_generation=number)
    if state.recovery is None:
        turn.set(recovery=Recovery(fault_at=at, learnt_at=turn.now))


# --- what leaders ask ------------------------------------------------------------------------------------------------


def missed(turn: Turn) -> tuple[CordonRecord, ...]:
    """The hosts that are cordoned for their GPUs' sake, where the job can not do without them; else none."""
    cordons, trainers = turn.state.cluster.cordons, turn.state.job.trainers
    sick = tuple(cordons[host].record for host in trainers if host in cordons and cordons[host].record.by == HEALTH)
    left = sum(1 for host in trainers if host not in cordons)
    return sick if left < elastic.limits(turn)[0] else ()


def failure_of(cordons: tuple[CordonRecord, ...]) -> Failure:
    """What a job that can not do without these hosts has failed of."""
    first = min(cordons, key=lambda cordon: cordon.at)
    return Failure(FailureCause.GPU_FAULT, first.host, first.at, message=first.why)


def present(turn: Turn, former: tuple[Member, ...]) -> tuple[Member, ...]:
    """Those of the former members who are there, cordoned or not; all hosts that are there, where none of them is."""
    nodes = turn.state.cluster.nodes
    hosts = [member.host for member in former if member.host in nodes]
    here = [nodes[host].record for host in hosts or turn.state.job.trainers if host in nodes]
    return tuple(Member(node.host, node.node_id, node.address, node.port_base, node.peer_port) for node in here)
