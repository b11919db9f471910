"""EtcdWatch: every change under a prefix, once and in order, whatever happens to the connection.

A thread of its own reads etcd's stream and posts into the event loop. When the stream ends, or has been silent for a
while (a connection cut without a word looks the same), the thread asks again whether it is still the same etcd, and
goes on after the last revision it has delivered.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading

from urllib3 import BaseHTTPResponse
from urllib3.exceptions import HTTPError, ReadTimeoutError

from keepstep.adapters.etcd.gateway import Gateway, Json, Request, decode, encode, key_values
from keepstep.ports import CoordinatorRefused, CoordinatorUnavailable, KeyEvent, WatchLost

_PENDING_MAX = 64
_TOGETHER_MAX = 256
_PAUSE_FIRST_S = 0.05
_PAUSE_MAX_S = 1.0


class EtcdWatch:
    """An asynchronous iterator over lists of events; see `keepstep.ports.KeyWatch`."""

    def __init__(self, gateway: Gateway, selection: Json, after_revision: int, marker: tuple[str, str | None]) -> None:
        """Prepare; `start` begins.

        Args:
            gateway: connections of this watch alone.
            selection: the fields that select the keys.
            after_revision: the last revision that is known already.
            marker: key of the cluster's marker, and its value where it has been read.
        """
        self._gateway = gateway
        self._selection = selection
        self._last = after_revision
        self._marker_key, self._marker = marker
        self._loop = asyncio.get_running_loop()
        self._inbox: asyncio.Queue[list[KeyEvent] | Exception | None] = asyncio.Queue()
        self._room = threading.BoundedSemaphore(_PENDING_MAX)
        self._stop = threading.Event()
        self._response: BaseHTTPResponse | None = None
        self._done = asyncio.Event()

    @property
    def ended(self) -> bool:
        """True once its thread has ended."""
        return self._done.is_set()

    def start(self, timeout_s: float, idle_s: float) -> None:
        """Begin to watch.

        Args:
            timeout_s: seconds for the questions asked before a stream is opened.
            idle_s: seconds of silence after which the stream is opened anew.
        """
        threading.Thread(target=self._run, args=(timeout_s, idle_s), name="etcd-watch", daemon=True).start()

    def __aiter__(self) -> EtcdWatch:
        return self

    async def __anext__(self) -> list[KeyEvent]:
        item = await self._inbox.get()
        if isinstance(item, list):
            self._room.release()
            return self._with_what_waits(item)
        self._inbox.put_nowait(None)  # whoever asks again hears the end again
        if item is None:
            raise StopAsyncIteration
        raise item

    def _with_what_waits(self, events: list[KeyEvent]) -> list[KeyEvent]:
        """More events behind these, as far as they are here already: whoever lags catches up at one go."""
        while len(events) < _TOGETHER_MAX and not self._inbox.empty():
            item = self._inbox.get_nowait()
            if not isinstance(item, list):
                self._inbox.put_nowait(item)  # nothing comes after an end
                break
            self._room.release()
            events = [*events, *item]
        return events

    async def aclose(self) -> None:
        self._stop.set()
        response = self._response
        if response is not None:
            with contextlib.suppress(RuntimeError, ValueError, OSError):
                response.shutdown()  # wakes the thread; already closed is fine
        await self._done.wait()

    # What follows runs in the watch's own thread.

    def _run(self, timeout_s: float, idle_s: float) -> None:
        end: Exception | None = WatchLost("the watch failed")
        pause_s = 0.0
        try:
            while not self._stop.wait(pause_s):
                before = self._last
                try:
                    self._follow(timeout_s, idle_s)
                    quiet = True
                except CoordinatorUnavailable:
                    quiet = False
                progress = quiet or self._last > before
                pause_s = _PAUSE_FIRST_S if progress or not pause_s else min(2 * pause_s, _PAUSE_MAX_S)
            end = None
        except (WatchLost, CoordinatorRefused) as error:
            end = error
        finally:
            self._gateway.close()
            with contextlib.suppress(RuntimeError):  # the loop is gone, and whoever listened with it
                self._loop.call_soon_threadsafe(self._finish, end)

    def _finish(self, end: Exception | None) -> None:
        self._inbox.put_nowait(end)
        self._done.set()

    def _follow(self, timeout_s: float, idle_s: float) -> None:
        """Deliver events until the stream falls silent (returns) or breaks (CoordinatorUnavailable)."""
        at_least = self._verify(timeout_s)
        selection = {**self._selection, "start_revision": self._last + 1}
        response = self._gateway.stream("/watch", {"create_request": selection}, idle_s)
        self._response = response
        try:
            for line in response:
                if self._stop.is_set():
                    return
                if line.strip():
                    self._take(json.loads(line), at_least)
        except (ReadTimeoutError, TimeoutError):
            return
        except (HTTPError, OSError, ValueError) as error:
            raise CoordinatorUnavailable(str(error)) from error
        finally:
            self._response = None
            response.close()
        raise CoordinatorUnavailable("the stream ended")

    def _verify(self, timeout_s: float) -> int:
        """Make sure that the same etcd answers, with nothing lost; return its revision.

        A linearizable read is never older than what was delivered before, even at a member that lags.
        """
        body = {"success": [{"request_range": {"key": encode(self._marker_key)}}]}
        answer = self._gateway.call(Request("/kv/txn", body, repeatable=True), lambda: timeout_s)
        revision = int(answer["header"]["revision"])
        found = key_values(answer["responses"][0]["response_range"])
        marker = found[0].value if found else None
        if self._marker is not None and marker != self._marker:
            raise WatchLost("another etcd answers: the old one's data is lost")
        if revision < self._last:
            raise WatchLost(f"etcd is at revision {revision}, and {self._last} was seen: its data is lost")
        self._marker = marker
        return revision

    def _take(self, chunk: Json, at_least: int) -> None:
        result = chunk.get("result")
        if result is None:
            raise CoordinatorUnavailable(f"the watch failed: {chunk.get('error')}")
        if result.get("canceled"):
            if int(result.get("compact_revision", 0)):
                raise WatchLost(f"revisions up to {result['compact_revision']} are compacted, {self._last} was seen")
            raise CoordinatorUnavailable(f"the watch was cancelled: {result.get('cancel_reason')}")
        if result.get("created") and int(result["header"]["revision"]) < at_least:
            raise CoordinatorUnavailable("another member answers than the one asked before")
        events = [_event(event) for event in result.get("events", ())]
        fresh = [event for event in events if event.revision > self._last and event.key != self._marker_key]
        if events:
            self._last = max(self._last, events[-1].revision)
        if fresh:
            self._deliver(fresh)

    def _deliver(self, events: list[KeyEvent]) -> None:
        while not self._room.acquire(timeout=0.2):
            if self._stop.is_set():
                return
        try:
            self._loop.call_soon_threadsafe(self._inbox.put_nowait, events)
        except RuntimeError:  # the loop is closed
            self._stop.set()


def _event(event: Json) -> KeyEvent:
    kv = event["kv"]
    deleted = event.get("type") == "DELETE"
    return KeyEvent(decode(kv["key"]), None if deleted else decode(kv.get("value", "")), int(kv["mod_revision"]))
