"""A Spot notice, heard before any signal: the job drains, commits the step it stopped at, and ends with 143."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.container import LOOP, Container
from tests.support.metadata_service import metadata_service

pytestmark = pytest.mark.integration


def interrupted_by(folder: Path, on: str, notice: str) -> tuple[int, Container]:
    """The exit code of a training that hears a notice once it has committed."""
    with Container(folder) as container, metadata_service() as service:
        container.fill()
        container.write("code/train.py", LOOP.replace("PLAN", "pass"))
        for setting in ("checkpoint.snapshot_every=4 steps", "checkpoint.every=8 steps", f"interruption.on={on}"):
            container.options += ["--set", setting]
        container.options += ["--store", str(folder / "store")]
        container.environment["AWS_EC2_METADATA_SERVICE_ENDPOINT"] = service.endpoint
        container.start()
        container.wait_for(lambda: container.metric("keepstep_durable_step"), "commit")
        if notice == "spot":
            service.take_away(time.time() + 120)
        else:
            service.recommend()
        return container.wait(), container


@pytest.mark.parametrize(("on", "notice"), [("[sigterm, imds]", "spot"), ("[sigterm, rebalance]", "rebalance")])
def test_a_notice_is_an_interruption(tmp_path, on, notice):
    code, container = interrupted_by(tmp_path, on, notice)
    assert code == 143, container.output()
    assert f"interruption noticed: {notice}" in container.output()
    assert "saved up to step" in (container.failure() or "")
