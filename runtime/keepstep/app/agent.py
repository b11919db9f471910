"""The agent's process: `app/starting.py`, loaded as fast as that can be."""

from __future__ import annotations

import gc
import sys

_SWITCH_S = 0.0005
"""How long a thread may keep the loop waiting: a tenth of Python's own; threads write a line here, or read one."""


def main(argv: list[str] | None = None) -> int:
    """Run this host's agent under init, and return the host's exit code."""
    gc.disable()
    sys.setswitchinterval(_SWITCH_S)
    from keepstep.app.starting import run

    return run(sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
