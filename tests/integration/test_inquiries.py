"""A worker is asked, beside its training, whether its gradients are ready; one that can not answer has none."""

from __future__ import annotations

import os
import signal

import pytest

from tests.integration.test_profiling import Host, played

pytestmark = pytest.mark.integration


def test_one_that_measures_nothing_says_so_and_one_that_is_stopped_says_nothing(tmp_path):
    async def play(host: Host) -> None:
        await host.train()
        assert host.process is not None
        known = host.link.first_rank
        assert await host.link.is_ready(known, 20.0) is None  # an answer: it has no TensorFlow
        os.kill(host.process.pid, signal.SIGSTOP)
        assert await host.link.is_ready(known, 0.2) is False
        assert await host.link.is_ready(7, 0.2) is None  # nobody of that name
        host.link.hang_up()
        assert await host.link.is_ready(known, 0.2) is None

    played(tmp_path, play)
