"""Text to values, once, at the start: what the platform says (`contract`) and what the user wants (`policy`).

What lives here: reading and parsing of files, environment and hyperparameters; errors name file, line and key. What
must never enter: a decision about training, and anything that runs after the start.
Start reading at `contract.load_contract` and `policy.load_policy`.
"""

from __future__ import annotations
