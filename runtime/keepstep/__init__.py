"""keepstep keeps synchronous TensorFlow training in step on Amazon SageMaker.

What lives here: the agent, in rooms with locked doors (`runtime/README.md` draws them). What must never enter this
file: an import. The build, every command and `keepstep.init`, which has no dependencies, read it.
Start reading at `keepstep.core`: the rest is sensors that make events and hands that perform actions.
"""

from __future__ import annotations

__version__ = "0.1.0"
