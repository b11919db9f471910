"""How keepstep is run: a container's command goes to init, which stays small; what a person types goes to the CLI."""

from __future__ import annotations

import sys

COMMANDS = frozenset({
    "local", "policy", "replay", "simulate", "checkpoint", "submit", "doctor",
    "status", "drain", "restart", "cordon", "uncordon", "cordons",
    "--help", "-h", "--version",
})  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code; `train`, nothing at all or any unknown word trains."""
    words = sys.argv[1:] if argv is None else argv
    if not words or words[0] not in COMMANDS:
        from keepstep import init

        return init.main(words[1:] if words[:1] == ["train"] else words)
    if words[0] == "--version":
        from keepstep import __version__

        print(f"keepstep {__version__}")
        return 0
    from keepstep.app import cli

    return cli.main(words)


if __name__ == "__main__":
    sys.exit(main())
