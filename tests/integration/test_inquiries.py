"""A worker is asked, beside its training, whether its gradients are ready; one that can not answer has none."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from keepstep import kernel
from tests.integration.test_profiling import Host, played

pytestmark = pytest.mark.integration


def test_one_that_measures_nothing_says_so_and_one_that_is_stopped_says_nothing(tmp_path):
    async def play(host: Host) -> None:
        await host.train()
        assert host.process is not None
        known = host.link.first_rank
        assert await host.link.is_ready(known, 20.0) is None  # an answer: it has no TensorFlow
        os.kill(host.process.pid, signal.SIGSTOP)
        async with asyncio.timeout(20):
            while not kernel.is_frozen(host.process.pid):
                await asyncio.to_thread(os.sched_yield)
        assert await host.link.is_ready(known, 0.2) is False
        assert await host.link.is_ready(7, 0.2) is None  # nobody of that name
        os.kill(host.process.pid, signal.SIGCONT)
        assert await host.link.is_ready(known, 20.0) is None  # the late answer is not taken for this one
        host.link.hang_up()
        assert await host.link.is_ready(known, 0.2) is None

    played(tmp_path, play)
