"""What runs on the user's own machine: making a training job, and following it.

What lives here: requests to SageMaker, what its SDK is given (`trainer.py`), the packing of code, the reading of a
job's log and status. What must never enter: anything that runs in a container, save for `driver/`, which the SDK brings
there; and what a policy means. Start reading at `request.py`.
"""

from __future__ import annotations

from keepstep.sdk.trainer import Keepstep

__all__ = ["Keepstep"]
