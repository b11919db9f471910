"""What workers print, passed on line by line, each with the name of who said it.

Threads do it, one per stream, so that a slow reader of our output holds up the worker through its pipe and never the
event loop. Nothing is lost and memory is bounded: a line of more than LINE_BYTES_MAX goes out in pieces.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import select
import stat
import threading
from collections.abc import Callable

CHUNK_BYTES = 262_144
LINE_BYTES_MAX = 8 * 1024 * 1024
PIPE_BYTES = 1024 * 1024
"""What a pipe is asked to hold; Linux lets everybody have that much by default."""

LAST_BYTES = 16_384
"""So much of a stream's end is remembered: a crash prints its reason, and then perhaps its stacks."""


class LineCutter:
    """Turns a stream of bytes into whole prefixed lines."""

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._begun: list[bytes] = []
        self._begun_bytes = 0

    def feed(self, chunk: bytes) -> bytes:
        """Return the lines that this chunk completes, prefixed; b"" where it completes none."""
        end = chunk.rfind(b"\n") + 1
        if not end:
            self._begin(chunk)
            return self.finish() if self._begun_bytes >= LINE_BYTES_MAX else b""
        whole = b"".join([*self._begun, chunk[: end - 1]])
        self._begun, self._begun_bytes = [], 0
        self._begin(chunk[end:])
        return self._prefix + whole.replace(b"\n", b"\n" + self._prefix) + b"\n"

    def rename(self, prefix: bytes) -> None:
        """Begin the lines that are not out yet with another prefix."""
        self._prefix = prefix

    def finish(self) -> bytes:
        """Return the line that was begun, with an end; b"" where there is none."""
        line, self._begun, self._begun_bytes = b"".join(self._begun), [], 0
        return self._prefix + line + b"\n" if line else b""

    def _begin(self, part: bytes) -> None:
        if part:
            self._begun.append(part)
            self._begun_bytes += len(part)


class LineSink:
    """A descriptor that several threads write whole lines to; share one per open file."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._turn = threading.Lock()
        # other processes write to a pipe too, and only a write of up to PIPE_BUF is not torn there
        self._piece_bytes = select.PIPE_BUF if stat.S_ISFIFO(os.fstat(fd).st_mode) else 1 << 30
        self.lost_bytes = 0
        """What could not be written since the reader is gone or the disk is full."""

    def write(self, lines: bytes) -> None:
        """Write whole lines; waits as long as the reader does not read, and never fails."""
        with self._turn:
            at = 0
            while at < len(lines):
                end = min(at + self._piece_bytes, len(lines))
                if end < len(lines):
                    end = lines.rfind(b"\n", at, end) + 1 or lines.find(b"\n", end) + 1
                try:
                    self._write_all(memoryview(lines)[at:end])
                except OSError:
                    self.lost_bytes += end - at
                at = end

    def _write_all(self, piece: memoryview) -> None:
        while piece:
            try:
                piece = piece[os.write(self.fd, piece) :]
            except BlockingIOError:  # somebody who shares the file made it non-blocking
                waiting = select.poll()
                waiting.register(self.fd, select.POLLOUT)
                waiting.poll()


def standard_sinks() -> tuple[LineSink, LineSink]:
    """The sinks of standard output and standard error: one and the same where both are one file."""
    out, err = os.fstat(1), os.fstat(2)
    sink = LineSink(1)
    return sink, (sink if (out.st_dev, out.st_ino) == (err.st_dev, err.st_ino) else LineSink(2))


class LineQueue:
    """The agent's own lines: `post` never waits, a thread writes them."""

    def __init__(self, sink: LineSink, lines_max: int = 10_000) -> None:
        self._sink = sink
        self._lines: queue.Queue[bytes | None] = queue.Queue(lines_max)
        self.lost_lines = 0
        """Lines that came while `lines_max` of them waited for a slow reader."""
        self._thread = threading.Thread(target=self._run, name="own lines", daemon=True)
        self._thread.start()

    def post(self, line: bytes) -> None:
        """Write a line (without its end) as soon as the reader allows."""
        try:
            self._lines.put_nowait(line + b"\n")
        except queue.Full:
            self.lost_lines += 1

    def close(self, timeout_s: float) -> bool:
        """Write what waits; False where the reader did not take it in time."""
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=timeout_s)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            self._sink.write(line)


class OutputPump:
    """Passes on one stream of one worker, in a thread of its own, until its end or `close`."""

    def __init__(self, prefix: bytes, sink: LineSink, held: bool = False) -> None:
        """Make the pipe. `write_fd` is for the worker; the caller closes it once the worker has it.

        Args:
            held: read nothing until `release`; what the pipe does not hold waits in the worker.
        """
        self._read_fd, self.write_fd = os.pipe2(os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # a smaller pipe does as well
            fcntl.fcntl(self.write_fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        os.set_blocking(self._read_fd, False)
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._cutter = LineCutter(prefix)
        self._sink = sink
        self._before = b""
        self._lock = threading.Lock()
        self._on_drained: Callable[[], None] | None = None
        self._closing = self._ended = False
        self._last = bytearray()
        self._thread = threading.Thread(target=self._run, name=prefix.decode("utf-8", "replace").strip(), daemon=True)
        if not held:
            self._thread.start()

    @property
    def last_words(self) -> str:
        """The end of what was passed on."""
        return self._last[-LAST_BYTES:].decode("utf-8", "replace")

    def copy(self) -> OutputPump:
        """Make one for a copy of this one's worker, which is held: it has written what that one has written by now."""
        made = OutputPump(b"", self._sink, held=True)
        with self._lock, contextlib.suppress(BlockingIOError):
            while not self._ended and (chunk := os.read(self._read_fd, CHUNK_BYTES)):
                self._before += chunk
        made._before = self._before
        return made

    def release(self, prefix: bytes, sink: LineSink) -> None:
        """Begin to pass on, to here and under this prefix, what a held worker has written and will write."""
        self._cutter.rename(prefix)
        self._sink = sink
        self._thread.start()

    def discard(self) -> None:
        """A held worker is gone, and nobody wants to know what it wrote."""
        with self._lock:
            self._end()

    def drain(self, on_drained: Callable[[], None]) -> None:
        """The worker is gone: call back, in some thread, once all that it wrote has been passed on.

        A process that it left behind may hold the pipe: what that one writes is passed on as well, but not waited for.
        """
        with self._lock:
            if not self._ended:
                self._on_drained = on_drained
                os.write(self._wake_w, b"d")
                return
        on_drained()

    def close(self) -> None:
        """Pass on what is there and end the thread; whoever still holds the pipe writes to nobody."""
        with self._lock:
            if not self._ended:
                self._closing = True
                os.write(self._wake_w, b"c")

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread; False where the reader of our output held it up for so long."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        self._pass(self._before)
        poll = select.poll()
        poll.register(self._read_fd, select.POLLIN)
        poll.register(self._wake_r, select.POLLIN)
        open_end = True
        while open_end and not self._closing:
            if any(fd == self._wake_r for fd, _ in poll.poll()):
                os.read(self._wake_r, 16)
                open_end = self._pass_on(fcntl.fcntl(self._read_fd, fcntl.F_GETPIPE_SZ))
                self._sink.write(self._cutter.finish())
                self._drained()
            else:
                open_end = self._pass_on(1)
        self._sink.write(self._cutter.finish())
        with self._lock:
            self._end()
        self._drained()

    def _end(self) -> None:
        self._ended = True
        for fd in (self._read_fd, self._wake_r, self._wake_w):
            os.close(fd)

    def _pass_on(self, bytes_min: int) -> bool:
        """Pass on what is there, or `bytes_min` of it where more keeps coming; False at the end of the stream."""
        passed_bytes = 0
        while passed_bytes < bytes_min:
            try:
                chunk = os.read(self._read_fd, CHUNK_BYTES)
            except BlockingIOError:
                return True
            if not chunk:
                return False
            self._pass(chunk)
            passed_bytes += len(chunk)
        return True

    def _pass(self, chunk: bytes) -> None:
        self._last += chunk
        if len(self._last) > 2 * LAST_BYTES:
            del self._last[:-LAST_BYTES]
        self._sink.write(self._cutter.feed(chunk))

    def _drained(self) -> None:
        with self._lock:
            on_drained, self._on_drained = self._on_drained, None
        if on_drained is not None:
            on_drained()
