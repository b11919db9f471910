"""The words after `train`: the same for init, which passes them on, and for the agent, which reads them."""

from __future__ import annotations

import argparse
from pathlib import Path

from keepstep.core.values import frozen
from keepstep.errors import ConfigError
from keepstep.intake.contract import BASE


@frozen
class TrainOptions:
    """What was said on the command line; None and empty where nothing was.

    Attributes:
        base_dir: where the platform's files are; /opt/ml in a container.
        policy: a preset's name, or a file.
        overrides: knobs set one by one, as `checkpoint.every=2min`.
        store: a directory or s3://bucket/prefix.
        address: where the other hosts reach this one; the host's name by default.
        etcd: address and client port of the etcd member of each host that has its own; by default a host's name,
            and the policy's port.
        port_base: first port for workers.
        scratch_dir: folder for what need not outlive the container.
        machine: what this host's machine is known by, where it only plays to be one of its own.
    """

    base_dir: Path
    policy: str | None
    overrides: tuple[str, ...]
    store: str | None
    address: str | None
    etcd: dict[str, tuple[str, int]]
    port_base: int
    scratch_dir: Path | None
    script: str | None
    arguments: tuple[str, ...]
    machine: str | None = None


class _Parser(argparse.ArgumentParser):
    """Errors become ConfigError, exit code 78 and not argparse's 2, which a policy may give a meaning of its own."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise ConfigError(message, "keepstep train [OPTIONS] [SCRIPT [ARGS...]]", file="command line")


def _base_dir_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="keepstep train", add_help=False, allow_abbrev=False)
    parser.add_argument("--base-dir", type=Path, default=BASE)
    return parser


def find_base_dir(argv: list[str]) -> Path:
    """The base directory, whatever else is wrong with the command line: what is wrong is written down there."""
    try:
        return Path(_base_dir_parser().parse_known_args(argv)[0].base_dir)
    except ConfigError:
        return BASE


def _place(text: str) -> tuple[str, tuple[str, int]]:
    host, _, place = text.partition("=")
    address, _, port = place.rpartition(":")
    if not host or not address or not port.isdecimal() or not 0 < int(port) < 65_535:
        raise argparse.ArgumentTypeError(f"found {text!r}, wanted HOST=ADDRESS:PORT")
    return host, (address, int(port))


def parse_train_options(argv: list[str]) -> TrainOptions:
    """Read the words after `train`.

    Raises:
        ConfigError: an option is unknown or lacks its value.
    """
    parser = _base_dir_parser()
    parser.add_argument("--policy")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KNOB=VALUE")
    parser.add_argument("--store")
    parser.add_argument("--address")
    parser.add_argument("--etcd", action="append", default=[], type=_place, metavar="HOST=ADDRESS:PORT")
    parser.add_argument("--port-base", type=int, default=20000)
    parser.add_argument("--scratch-dir", type=Path)
    parser.add_argument("--machine")
    parser.add_argument("--entry")
    parser.add_argument("words", nargs=argparse.REMAINDER)
    found = parser.parse_args(argv)
    words = [word for at, word in enumerate(found.words) if not (at == 0 and word == "--")]
    script = found.entry if found.entry is not None else (words.pop(0) if words else None)
    return TrainOptions(
        base_dir=found.base_dir,
        policy=found.policy,
        overrides=tuple(found.overrides),
        store=found.store,
        address=found.address,
        etcd=dict(found.etcd),
        port_base=found.port_base,
        scratch_dir=found.scratch_dir,
        script=script,
        arguments=tuple(words),
        machine=found.machine,
    )
