"""TensorFlow's `checkpoint` file, which names the checkpoints of its folder and the latest of them.

Source: TensorFlow's `CheckpointState` message in text form, as `tf.train.CheckpointManager` and `Checkpoint.save` write
it: one field a line, strings escaped as in C.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from keepstep.core.values import frozen

STATE_NAME = "checkpoint"
STATE_BYTES_MAX = 16 << 20

_FIELD = re.compile(
    r'^\s*(model_checkpoint_path|all_model_checkpoint_paths)\s*:\s*"((?:[^"\\]|\\.)*)"\s*$', re.MULTILINE
)
_ESCAPE = re.compile(rb"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{1,2})|(.))", re.DOTALL)
_ESCAPED = {b"n": b"\n", b"t": b"\t", b"r": b"\r"}
_PLAIN = frozenset(range(0x20, 0x7F)) - set(b'"\\')


@frozen
class NamedCheckpoints:
    """Prefixes that a state file names, without their folders."""

    latest: str = ""
    """Empty where it names none."""
    prefixes: frozenset[str] = frozenset()


def parse_state(text: str) -> NamedCheckpoints:
    """Read a state file; of what is none, nothing is found."""
    latest, prefixes = "", set()
    for field, value in _FIELD.findall(text):
        prefix = _unescaped(value).rpartition("/")[2]
        prefixes.add(prefix)
        if field == "model_checkpoint_path":
            latest = prefix
    return NamedCheckpoints(latest, frozenset(prefixes - {""}))


def format_state(named: Sequence[tuple[str, int]]) -> str:
    """The state file of a folder that holds these checkpoints, the last of them the latest.

    A `CheckpointManager` deletes only what is younger than the last that it was to preserve for good: without the
    times it would never delete any of these.

    Args:
        named: at least one prefix, each with the time at which it was written, in nanoseconds since 1970.
    """
    second = 1_000_000_000
    prefixes, times = [_escaped(prefix) for prefix, _ in named], [mtime_ns for _, mtime_ns in named]
    lines = [f'model_checkpoint_path: "{prefixes[-1]}"']
    lines += [f'all_model_checkpoint_paths: "{prefix}"' for prefix in prefixes]
    lines += [f"all_model_checkpoint_timestamps: {mtime_ns / second!r}" for mtime_ns in times]
    lines.append(f"last_preserved_timestamp: {(min(times) - second) / second!r}")
    return "\n".join(lines) + "\n"


def _unescaped(value: str) -> str:
    def plain(found: re.Match[bytes]) -> bytes:
        octal, hexadecimal, other = found.groups()
        if other is not None:
            return _ESCAPED.get(other, other)
        return bytes([int(octal, 8) & 0xFF if octal is not None else int(hexadecimal, 16)])

    return _ESCAPE.sub(plain, value.encode()).decode("utf-8", "surrogateescape")


def _escaped(value: str) -> str:
    data = value.encode("utf-8", "surrogateescape")
    return "".join(chr(byte) if byte in _PLAIN else f"\\{byte:03o}" for byte in data)
