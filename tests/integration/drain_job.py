"""A training for the drain tests: `drain_job.py LAST_STEP [gated]`; gated, it reads a line of stdin in each step."""

from __future__ import annotations

import sys

from keepstep_worker.session import Session
from keepstep_worker.slab import Tensor, fill

session = Session.current()
assert session is not None
state = {"step": 0}
view = session.restored()
if view is not None:
    state["step"] = int.from_bytes(view.raw("replicated/step"), "little")
    session.restoration_done(view.step)
session.set_provider(
    lambda: [Tensor("replicated/step", "I64", (), lambda target: fill(target, state["step"].to_bytes(8, "little")))]
)
session.join("loop", int(sys.argv[1]))
for step in range(state["step"] + 1, int(sys.argv[1]) + 1):
    session.enter_step(step)
    if "gated" in sys.argv:
        sys.stdin.readline()
    state["step"] = step
    session.complete_step(step)
session.finish()
print("the script went on")
