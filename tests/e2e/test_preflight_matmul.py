"""Multiplications of matrices by the user's own TensorFlow, as a preflight has them made; on processors here."""

from __future__ import annotations

import asyncio
import os
import sys

import pytest

from keepstep.app.preflight import multiply
from keepstep.core.preflight_records import Check
from tests.support.local_run import PYTHON

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


def test_the_slowest_device_s_rate_is_told():
    (rate,) = asyncio.run(multiply(PYTHON, dict(os.environ), "CPU", 256))
    assert rate.check is Check.MATMUL and rate.value > 1e6


def test_no_such_device_and_no_tensorflow_are_no_rate():
    assert asyncio.run(multiply(PYTHON, dict(os.environ), "GPU", 256)) == []
    assert asyncio.run(multiply(sys.executable, dict(os.environ), "CPU", 256)) == []
