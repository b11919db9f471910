"""What a user can set about the health of hosts: GPUs, who is slow, who is looked at before the start."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from keepstep.core.knobs import Section, knob
from keepstep.core.quantities import Seconds, SecondsOrOff


class Straggler(Section):
    """When a rank is said to be slow, and what follows; of training whose steps are timed, of two hosts and more."""

    slower_than: float = knob(
        1.3, "So many times as long as its peers a rank works on a step before it counts as slow.", unit="ratio",
        failure="a host that all others wait for in each step", ge=1.05, le=100.0, strict=True,
    )  # fmt: skip
    window: int = knob(
        8, "Steps that are compared at a time.", unit="steps", failure="steps that differ among themselves", ge=5,
        le=10_000, strict=True,
    )  # fmt: skip
    windows: int = knob(
        4, "In so many windows more than it is well in it has to be slow to be a straggler.", unit="count",
        failure="a host that is slow for a moment", ge=1, le=1000, strict=True,
    )  # fmt: skip
    respond: Literal["off", "observe", "profile", "rebalance", "replace"] = knob(
        "observe", "What to do about it: off, tell (observe), profile it, give it smaller batches, or do without it.",
        unit="name", failure="a slow host that is paid for as a fast one",
    )  # fmt: skip


class Gpu(Section):
    """How GPUs are watched."""

    poll: Seconds = knob(
        5.0, "Time between two readings of the GPUs.", unit="duration", failure="a GPU that fails unseen", ge=0.5,
        le=3600,
    )  # fmt: skip
    fatal_xids: tuple[Annotated[int, Field(ge=1, le=1023, strict=True)], ...] = knob(
        (48, 63, 64, 74, 79, 94, 95), "Xid errors after which a GPU is not trained on any more, by NVIDIA's numbers.",
        unit="list of numbers", failure="a GPU that works on, and wrongly", max_length=100, range="1 to 1023",
    )  # fmt: skip
    temperature_max: float = knob(
        92.0, "A GPU that is hotter than this on three readings in a row is not trained on any more.",
        unit="degrees Celsius", failure="a GPU whose cooling has failed", ge=40.0, le=150.0, strict=True,
    )  # fmt: skip


class Health(Section):
    """What is watched on a host."""

    preflight: Literal["off", "warn", "exclude", "fail"] = knob(
        "warn", "What to do about a host that is found bad before it trains; exclude and fail have the start wait.",
        unit="name", failure="a host that is slow, cut off or broken from the start, which all others wait for",
    )  # fmt: skip
    repeat: SecondsOrOff = knob(
        None, "How often a step is done again with each rank on another host, and compared bit by bit: a time, or off.",
        unit="duration", failure="a processor or a GPU that now and then computes something wrong, and says nothing",
    )  # fmt: skip
    gpu: Gpu = Gpu()
    cordon_max: int = knob(
        10, "Percent of the hosts that keepstep cordons by itself at the most, but always one; for GPUs' faults all.",
        unit="percent", failure="a fault of all hosts that looks like one of each", ge=0, le=100, strict=True,
    )  # fmt: skip
