"""A store in S3: the requests (`store`), the parts of a large object (`parts`), what errors mean (`errors`).

What lives here: one way to ask S3 for what the port names. What must never enter: what a checkpoint is made of, or when
something is tried again beyond one object's upload. Start reading at `store`.
"""

from __future__ import annotations

from keepstep.adapters.s3.parts import PART_BYTES_MIN
from keepstep.adapters.s3.store import SINGLE_PUT_BYTES_MAX, S3Options, S3Store

__all__ = ["PART_BYTES_MIN", "SINGLE_PUT_BYTES_MAX", "S3Options", "S3Store"]
