"""Decisions: what a node does next, given what it knows, what happened and what time it is.

What lives here: pure functions and frozen values; pydantic for the policy. What must never enter: await, a clock,
randomness, I/O, the environment, logging.
Start reading at `decide.decide`, then `state` (what is known), `events` (what happens) and `actions` (what is done).
"""

from __future__ import annotations
