"""Checkpoints as the store holds them: names, shares of the ranks, when one exists, what may be deleted.

What lives here: the slab's file layout, digests, the formats of manifest and HEAD, the shares of the ranks, and upload,
commit, restore and retention against any `ObjectStore`; in `files`, checkpoints that scripts write by themselves. What
must never enter: a store's own library, the environment, a clock (times are arguments), a decision about when to save.
Start reading at `manifest` (what exists), then `commit` (when it exists).
"""

from __future__ import annotations
