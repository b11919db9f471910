"""The agent's process: `app/node.py`, loaded as fast as that can be."""

from __future__ import annotations

import gc
import sys


def main(argv: list[str] | None = None) -> int:
    """Run this host's agent under init, and return the host's exit code.

    What is loaded stays, so that looking through it for garbage again and again is in vain.
    """
    gc.disable()
    from keepstep.app.node import run

    gc.freeze()
    gc.enable()
    return run(sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
