"""Checkpoints that scripts write by themselves, as the store holds them: committed as one, and put back.

What lives here: the format of their manifest, upload and commit, retention, and the writing of a committed one into the
script's folder. What must never enter: TensorFlow or Keras, a store's own library, a clock, a decision about when.
Start reading at `manifest` (what exists), then `keeping` (how it gets there), then `put_back`.
"""

from __future__ import annotations
