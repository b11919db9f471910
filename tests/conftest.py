"""What holds for every test: property tests never judge by the clock, and a failure prints how to replay it."""

from __future__ import annotations

import os
import signal

from hypothesis import settings

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # processes under test would inherit that nohup has it ignored

settings.register_profile("workbench", deadline=None, print_blob=True)
settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "workbench")
