"""The two encodings below TensorFlow's index files: varints, and protocol buffers' fields.

Source: the protocol buffers' description of their wire format.
"""

from __future__ import annotations

from collections.abc import Iterator

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_VARINT_BYTES_MAX = 10

Value = int | bytes
"""Of a varint or a fixed number; of a string, bytes or a message."""


class MalformedWire(Exception):
    """Bytes are no such encoding; the message says at which byte."""


def parse_varint(data: bytes | memoryview, at: int) -> tuple[int, int]:
    """The number that begins at byte `at`, and where it ends.

    Raises:
        MalformedWire: the data end within it, it is above 64 bits, or longer than it need be.
    """
    value = 0
    for index in range(_VARINT_BYTES_MAX):
        if at + index >= len(data):
            raise MalformedWire(f"the data end within the varint at byte {at}")
        byte = data[at + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            if value >> 64 or (byte == 0 and index):
                raise MalformedWire(f"the varint at byte {at} is not in its shortest form, or above 64 bits")
            return value, at + index + 1
    raise MalformedWire(f"the varint at byte {at} does not end")


def parse_fields(message: bytes) -> Iterator[tuple[int, Value]]:
    """Deliver number and value of each field of a message, in the order they stand there.

    Raises:
        MalformedWire: it is no message.
    """
    at = 0
    while at < len(message):
        tag, at = parse_varint(message, at)
        kind = tag & 7
        value: Value
        if kind == _VARINT:
            value, at = parse_varint(message, at)
        elif kind in (_BYTES, _FIXED32, _FIXED64):
            size, at = parse_varint(message, at) if kind == _BYTES else (4 if kind == _FIXED32 else 8, at)
            piece = message[at : at + size]
            if len(piece) != size:
                raise MalformedWire(f"the message ends within the field at byte {at}")
            value, at = piece if kind == _BYTES else int.from_bytes(piece, "little"), at + size
        else:
            raise MalformedWire(f"wire type {kind} at byte {at}")
        yield tag >> 3, value


def signed(value: int) -> int:
    """The int64 that a varint stands for."""
    return value - (1 << 64) if value >> 63 else value
