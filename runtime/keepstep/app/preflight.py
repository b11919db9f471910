"""This host's part in a preflight: measured in processes that can be killed, side by side, and done in time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keepstep import kernel
from keepstep.adapters.clock import monotonic, sleep
from keepstep.adapters.nvml import parse_line
from keepstep.adapters.uploader import UploaderGone
from keepstep.app.measuring import look_at_gpus, processors
from keepstep.app.places import Places
from keepstep.app.setting_up import Setup
from keepstep.app.storing import Storing
from keepstep.core.actions import CheckHost
from keepstep.core.events import Event, HostChecked
from keepstep.core.preflight_records import Check, Complaint, Guest, Link, Rate
from keepstep.core.preflight_verdict import show
from keepstep.intake.contract import count_gpus
from keepstep.ports import GpuSample

_AGAIN_S = 0.2
_DEATH_S = 1.0
_LINKS_S = 1.0
"""Of the time there is, what is kept for the answer where lines take all they may."""
_NOT_YET = "invalid"
"""What an uploader answers that has not been told of its store."""
MATMUL = """
import json, os, sys, time
os.environ.update(TF_FORCE_GPU_ALLOW_GROWTH="true", TF_CPP_MIN_LOG_LEVEL="3")
import tensorflow as tf
kind, side = sys.argv[1], int(sys.argv[2])
rates = []
for device in tf.config.list_logical_devices(kind):
    with tf.device(device.name):
        matrix, best = tf.random.normal((side, side)), 0.0
        float(tf.matmul(matrix, matrix)[0, 0])
        for _ in range(3):
            begun = time.perf_counter()
            for _ in range(10):
                product = tf.matmul(matrix, matrix)
            float(product[0, 0])
            best = max(best, 10 * 2 * side**3 / (time.perf_counter() - begun))
        rates.append(best)
print(json.dumps(rates))
"""
"""Operations a second of each device. The last product is read, and so waited for."""
SIDE = 4096


@dataclass
class _Findings:
    """What has been found so far."""

    rates: list[Rate] = field(default_factory=list)
    complaints: list[Complaint] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)


class Preflight:
    """Looks at this host when it is told to; one look at a time."""

    def __init__(
        self, setup: Setup, storing: Storing, post: Callable[[Event], None], log: Callable[[str], None]
    ) -> None:
        self._python, self._environment = setup.job.python, setup.environment
        self._folders = folders(setup.places, setup.contract.paths.output_data, setup.contract.paths.model)
        self._machine = str(setup.contract.resource_config.get("current_instance_type") or "")
        self._storing, self._post, self._log = storing, post, log
        self._under_way: asyncio.Task[None] | None = None

    def begin(self, action: CheckHost, tasks: asyncio.TaskGroup) -> None:
        """Look at this host, and say what was found."""
        self.close()
        self._under_way = tasks.create_task(self._check(action))

    def close(self) -> None:
        """The job is over: nobody wants to know any more."""
        if self._under_way is not None:
            self._under_way.cancel()

    async def _check(self, action: CheckHost) -> None:
        began, found = monotonic(), _Findings()
        looks = (
            (Check.SPEED, self._measure(action, found)),
            (Check.GPU, self._ask_gpus(action, found)),
            (Check.STORE, self._ask_store(found)),
        )
        async with asyncio.TaskGroup() as tasks:
            for check, look in looks:
                tasks.create_task(_within(action.limit_s - _LINKS_S, look, check, found))
        seconds = round(monotonic() - began, 3)
        self._log(f"preflight: {_summary(found)}; {seconds:.1f} s")
        self._post(
            HostChecked(
                action.operation,
                self._machine,
                tuple(found.rates),
                tuple(found.complaints),
                tuple(found.links),
                seconds,
            )
        )

    async def _measure(self, action: CheckHost, found: _Findings) -> None:
        """First what this host can do by itself, then its lines: they want its processors, too."""
        until = monotonic() + action.limit_s - 2 * _LINKS_S
        threads = max(1, processors() - 1) if action.quiet else 1  # one is left for those who try this host's line
        disks = [word for name, folder in self._folders for word in ("--disk", f"{name}={folder}")]
        told: set[str] = set()

        def take(line: str) -> None:
            ((name, value),) = json.loads(line).items()
            told.add(name)
            if name != "disk":
                found.rates.append(Rate(Check(name), float(round(value))))
            elif value["level"] == "bad":
                found.complaints.append(Complaint(Check.DISK, value["found"]))

        module = (*kernel.interpreter(), "-m", "keepstep.app.measuring")
        await _run((*module, "--threads", str(threads), *disks, "--parent-pid", str(os.getpid())), take)
        if "disk" not in told:
            found.complaints.append(Complaint(Check.SPEED, "what measures it has died"))
        await self._try_lines(action.peers, until, found)

    async def _try_lines(self, peers: tuple[Guest, ...], until: float, found: _Findings) -> None:
        """One after the other; what there is no time for any more is not held against anybody."""
        for peer in peers:
            if not peer.peer_port:
                continue
            command = {"command": "try", "peers": [(peer.host, peer.address, peer.peer_port)]}
            try:
                async with asyncio.timeout(until - monotonic()):
                    reply = await self._storing.ask(command)
            except (TimeoutError, UploaderGone):
                return
            if reply.get("ok"):
                found.links += [_rounded(Link(**each)) for each in reply["links"]]

    async def _ask_gpus(self, action: CheckHost, found: _Findings) -> None:
        """What the driver sees of the devices there are, and how fast they are where nothing else runs on them."""
        promised = count_gpus()
        if not promised:
            found.rates.append(Rate(Check.GPU, 0.0))
            return
        samples: list[GpuSample] = []
        module = (*kernel.interpreter(), "-m", "keepstep.adapters.nvml")
        await _run((*module, "--once"), lambda line: samples.extend(parse_line(line)))
        found.complaints += [Complaint(Check.GPU, each.found) for each in look_at_gpus(samples, promised)]
        found.rates.append(Rate(Check.GPU, float(sum(1 for sample in samples if not sample.lost))))
        if action.quiet:
            found.rates += await multiply(self._python, self._environment)

    async def _ask_store(self, found: _Findings) -> None:
        """Whether the store does what commits rest on: the uploader probes it before it does anything else with it."""
        while self._storing.has_store:
            try:
                reply = await self._storing.ask({"command": "recall", "place": "preflight"})
            except UploaderGone:
                reply = {"error": _NOT_YET}
            if reply.get("ok"):
                return
            if reply.get("error") not in (_NOT_YET, "unavailable"):  # one that is only busy has until the end
                found.complaints.append(Complaint(Check.STORE, str(reply.get("detail"))))
                return
            await sleep(_AGAIN_S)


async def multiply(python: str, environment: Mapping[str, str], kind: str = "GPU", side: int = SIDE) -> list[Rate]:
    """What the slowest device multiplies; nothing where this interpreter has no TensorFlow that sees one."""
    rates: list[Rate] = []

    def take(line: str) -> None:
        with contextlib.suppress(ValueError, TypeError):  # whatever else is printed there
            rates.append(Rate(Check.MATMUL, float(round(min(map(float, json.loads(line)))))))

    await _run((python, "-c", MATMUL, kind, str(side)), take, environment)
    return rates


def folders(places: Places, output: Path, model: Path) -> tuple[tuple[str, Path], ...]:
    """The folders without which a job has lost what it made, by name."""
    return ("scratch", places.scratch.absolute()), ("output", output), ("model", model)


async def _within(limit_s: float, look: Coroutine[Any, Any, None], check: Check, found: _Findings) -> None:
    """What does not answer in time is a finding, too; so is what can not be started.

    A driver that nobody has used yet may take longer than that, on all hosts alike: so its host is held against the
    others as one that shows no GPU. Where TensorFlow's import does, they were not measured.
    """
    try:
        async with asyncio.timeout(limit_s):
            await look
    except TimeoutError:
        if check is not Check.GPU:
            found.complaints.append(Complaint(check, f"no answer within {limit_s:.0f} s"))
        elif all(rate.check is not Check.GPU for rate in found.rates):
            found.rates.append(Rate(Check.GPU, 0.0))
    except (OSError, ValueError) as error:
        found.complaints.append(Complaint(check, str(error)[:200]))


async def _run(words: Sequence[str], take: Callable[[str], None], environment: Mapping[str, str] | None = None) -> None:
    """Run a process and hand over the lines that it prints; it is killed where nobody waits for it any more."""
    process = await asyncio.create_subprocess_exec(
        *words, env=environment, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        while line := await process.stdout.readline():
            take(line.decode(errors="replace"))
        await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            with contextlib.suppress(TimeoutError):  # one that is deep in a driver is not waited for
                async with asyncio.timeout(_DEATH_S):
                    await process.wait()


def _rounded(link: Link) -> Link:
    return Link(link.peer, float(round(link.sent)), float(round(link.received)), round(link.ahead_s, 4), link.error)


def _summary(found: _Findings) -> str:
    """One line for people: with a single host it is all that can be said."""
    rates = [f"{rate.check.value} {show(rate)}" for rate in found.rates if rate.value]
    links = [
        f"{link.peer} {link.error}" if link.error
        else f"{link.peer} {link.sent / 1e6:.0f} MB/s there, {link.received / 1e6:.0f} back"
        for link in found.links
    ]  # fmt: skip
    return "; ".join([*rates, *links, *(f"{each.check.value}: {each.text}" for each in found.complaints)])
