"""The uploader: the only process that reads slabs and talks to the store; of low priority, a child of the agent.

`python -m keepstep.app.uploader --socket-fd N` serves commands until the socket ends. A command is a JSON object with
`id` and `command`, a slab's descriptor beside it where one is wanted (+ fd); the reply has the same `id` and `ok`.
Where `ok` is false, `error` is one of ERRORS and `detail` says more.

    open    store, job, [endpoint]                  a probe; where the store is away, each later command tries it again
    head    [without], [files: true]                head: {generation, step, manifest, digest, run} or null; unreadable;
                                                    files, files_generation: of the script's own
    verify  slab, step, size_bytes + fd             replicated, local, head_bytes, replicated_bytes, local_bytes
    upload  slab, step, generation, run, rank, world, size_bytes + fd             objects, replicated, bytes, seconds
    commit  generation, step, run, world, digest, objects                         manifest, seconds
    compare generation, step, run, digests                                        differ: ranks, and tensors of theirs
    fetch   manifest, rank, world, [peers, group, place] + fd of an empty file  step, size_bytes, replicated, local,
                                                    brought, trouble
    seals   + fd of the control page                where it is seen which slabs are still what they were
    listen  [ca, cert, key] + fd of a socket        other hosts may have from now on what is offered, and try this line
    try     peers                                   links: {peer, sent, received, ahead_s} or {peer, error}
    offer   slab, step, digest, size_bytes + fd     offered: false where the slab is not sealed with that step any more
    watch   wait_s                                  edition, sets, trouble, once there is one after the one named
    settle                                          edition, sets, trouble, after a look at the folder
    keep    generation, run                         edition, manifest, number, uploaded_bytes, seconds
    put_back manifest, own                          edition, sets, brought, aside; all four: root, spool, after, too
    sweep   keep_last, keep_every, generation, [restoring, grace_s]               manifests, objects, unfinished
    trust                                           authority, etag; null where there is none
    entrust authority, [replaces: etag]             written: false where another host was first
    forget  etag                                    removed: false where another authority is there
    note    place, text or file                     for people, or for the next attempt
    recall  place                                   text; null where nothing was noted there
    cordons                                         cordons: what, host, by, why, at; the oldest first
    cordon  cordons, lifted                         once the list has these, and not those
    ping                                            to show that commands are read
    notices                                         spot_at, rebalance; away where no metadata service answers

Each family of commands has a thread of its own, so that none waits behind another's bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, NoReturn

from keepstep.adapters import clock
from keepstep.adapters.uploader import IN_FLIGHT_MAX, PacketError, receive_packet, send_packet
from keepstep.app import papers
from keepstep.app.connecting import connect_store, s3_settings
from keepstep.app.filing import Filing, Stuck
from keepstep.app.giving import Giving, InvalidCommand, number, text, wanted
from keepstep.checkpoint import commit, restore, retention, tables, upload
from keepstep.checkpoint.digests import ShortSlab
from keepstep.checkpoint.keys import ManifestName, files_line, is_job, is_run
from keepstep.checkpoint.manifest import build_manifest, parse_stored_object
from keepstep.checkpoint.peering import Peers
from keepstep.checkpoint.probe import probe_store
from keepstep.checkpoint.retrying import RetryingStore
from keepstep.checkpoint.safetensors import MalformedSlab
from keepstep.checkpoint.strict_json import MalformedDocument
from keepstep.checkpoint.tier import TieredStore
from keepstep.ports.store import (
    ChecksumMismatch,
    NotFound,
    ObjectStore,
    StoreError,
    StoreRefused,
)

ERRORS: Final = ("fenced", "unavailable", "refused", "corrupt", "missing", "conflict", "stuck", "invalid")
"""fenced: a newer generation or another run has HEAD; unavailable: try again; refused: for good; corrupt: bytes are not
what they should be; missing: an object is gone; conflict: decided otherwise already; stuck: the script's folder can not
be written; invalid: no such command."""

LANES: Final = {
    "open": "head", "head": "head", "verify": "verify", "upload": "upload", "commit": "commit", "fetch": "fetch",
    "sweep": "sweep", "compare": "sweep", "trust": "head", "entrust": "head", "forget": "head",
    "ping": "ping", "note": "papers", "recall": "head", "cordons": "papers", "cordon": "papers",
    "watch": "watch", "settle": "files", "keep": "files", "put_back": "files",
    "seals": "verify", "listen": "verify", "offer": "verify", "notices": "notices", "try": "try",
}  # fmt: skip
NICENESS = 10
EXIT_BUG = 70
PR_SET_PDEATHSIG = 1
_FAMILIES: Final[tuple[tuple[type[Exception] | tuple[type[Exception], ...], str], ...]] = (
    (commit.Fenced, "fenced"),
    (commit.StaleStep, "conflict"),
    ((MalformedDocument, MalformedSlab, ShortSlab, ChecksumMismatch, restore.CorruptObject), "corrupt"),
    (Stuck, "stuck"),
    (NotFound, "missing"),
    (StoreRefused, "refused"),
    ((StoreError, restore.NoRoom), "unavailable"),  # it is the host that lacks memory: the store refuses nothing
)


class Uploader:
    """What the commands do; one method for each, called in the thread of its lane."""

    def __init__(self) -> None:
        self._opening = threading.Lock()
        self._where: tuple[str, str, str | None, Mapping[str, Any]] | None = None
        self._store: ObjectStore | None = None
        self._local = ""
        self._giving, self._filing = Giving(), Filing()
        self._ask_metadata: Callable[[], dict[str, object]] | None = None

    def perform(self, command: Mapping[str, Any], fd: int | None) -> dict[str, object]:
        """Carry a command out and return what the reply holds beside `id` and `ok`.

        Raises:
            InvalidCommand: a field is missing or of a wrong type.
        """
        match command.get("command"):
            case "open":
                return self._open(command)
            case "head":
                return self._head(command)
            case "verify":
                return self._verify(command, wanted(fd))
            case "upload":
                return self._upload(command, wanted(fd))
            case "commit":
                return self._commit(command)
            case "compare":
                return self._compare(command)
            case "fetch":
                return self._fetch(command, wanted(fd))
            case "seals" | "listen" | "offer" | "try" as what:
                return self._giving.perform(what, command, fd)
            case "watch" | "settle" | "keep" | "put_back" as what:
                return self._files(what, command)
            case "sweep":
                return self._sweep(command)
            case "trust" | "entrust" | "forget" | "note" | "recall" | "cordons" | "cordon" as what:
                return papers.perform(what, command, *self._opened())
            case "notices":
                return self._notices()
            case "ping":
                return {}
            case other:
                raise InvalidCommand(f"no command {other!r}")

    def _open(self, command: Mapping[str, Any]) -> dict[str, object]:
        job, endpoint = text(command, "job"), command.get("endpoint")
        if not is_job(job) or not isinstance(endpoint, str | None):
            raise InvalidCommand(f"job {job!r} or endpoint {endpoint!r} can not be")
        with self._opening:
            self._where, self._store = (text(command, "store"), job, endpoint, s3_settings(command)), None
            self._local = str(command.get("local") or "")
        self._opened()
        return {}

    def _opened(self) -> tuple[ObjectStore, str]:
        with self._opening:
            if self._where is None:
                raise InvalidCommand("no store was named yet")
            url, job, endpoint, settings = self._where
            if self._store is None:
                store = connect_store(url, endpoint, settings)
                probe_store(store, job, commit.new_nonce())  # without patience: whoever wants the store comes again
                patient = RetryingStore(store)
                self._store = TieredStore(patient, Path(self._local), job) if self._local else patient
            return self._store, job

    def _head(self, command: Mapping[str, Any]) -> dict[str, object]:
        store, job = self._opened()
        if "claim" in command:
            for line in (job, files_line(job)) if command.get("files") is True else (job,):
                commit.claim(store, line, number(command, "claim"), _run(command))
        without = _texts(command, "without")
        head, unreadable = commit.newest_checkpoint(store, job, without)
        shown = head and {name: value for name, value in asdict(head).items() if name != "nonce"}
        files = self._filing.newest(store, job, without) if command.get("files") is True else {}
        return {"head": shown, "unreadable": list(unreadable), **files}

    def _files(self, what: str, command: Mapping[str, Any]) -> dict[str, object]:
        with self._opening:
            url, job, *_ = self._where or ("", "", None, {})
        self._filing.open(command, Path(url).resolve() / job if url and "://" not in url else None)
        if what in ("settle", "watch"):
            return self._filing.settle() if what == "settle" else self._filing.watch(command)
        if what == "put_back":
            return self._filing.put_back(command, lambda: self._opened()[0], job)
        return self._filing.keep(command, *self._opened())

    def _verify(self, command: Mapping[str, Any], fd: int) -> dict[str, object]:
        measured = upload.measure_slab(fd, number(command, "size_bytes"))
        return {"replicated": measured.replicated, "local": measured.local, **asdict(measured.layout)}

    def _upload(self, command: Mapping[str, Any], fd: int) -> dict[str, object]:
        store, job = self._opened()
        rank, world_size = number(command, "rank"), number(command, "world")
        if rank >= world_size:
            raise InvalidCommand(f"rank {rank} of {world_size}")
        order = upload.UploadOrder(job, _name(command), rank, world_size, number(command, "size_bytes"))
        begun = clock.monotonic()
        done = upload.upload(store, fd, order)
        return {
            "objects": [asdict(stored) for stored in done.objects],
            "replicated": done.replicated,
            "bytes": done.size_bytes,
            "seconds": clock.monotonic() - begun,
        }

    def _commit(self, command: Mapping[str, Any]) -> dict[str, object]:
        store, job = self._opened()
        begun = clock.monotonic()
        entries = command.get("objects")
        if not isinstance(entries, list):
            raise InvalidCommand("objects must be a list")
        objects = [parse_stored_object(entry, f"objects[{i}]") for i, entry in enumerate(entries)]
        world_size, digest, now_unix = number(command, "world"), text(command, "digest"), int(clock.unix_time())
        manifest = build_manifest(job, _name(command), world_size, digest, objects, now_unix)
        return {"manifest": commit.commit(store, manifest), "seconds": clock.monotonic() - begun}

    def _compare(self, command: Mapping[str, Any]) -> dict[str, object]:
        store, job = self._opened()
        digests = command.get("digests")
        if not isinstance(digests, list) or not digests or not all(isinstance(each, str) for each in digests):
            raise InvalidCommand("digests must be a list of strings")
        return {"differ": tables.differing(store, job, _name(command), digests)}

    def _fetch(self, command: Mapping[str, Any], fd: int) -> dict[str, object]:
        store, job = self._opened()
        begun = clock.monotonic()
        manifest = commit.read_manifest(store, job, text(command, "manifest"))
        peers = Peers(self._giving.others(command))
        try:
            with self._giving.exchange(command, fd, manifest.step, manifest.digest) as exchange:
                fetched = restore.fetch(store, manifest, number(command, "rank"), fd, peers, exchange)
        finally:
            peers.close()
        parts, also = ({}, []) if exchange is None else (exchange.brought, exchange.trouble)
        brought = {host: peers.brought.get(host, 0) + parts.get(host, 0) for host in {**peers.brought, **parts}}
        peered = {"brought": brought, "trouble": [*peers.trouble, *also]}
        return {"step": manifest.step, **asdict(fetched), **peered, "seconds": clock.monotonic() - begun}

    def _sweep(self, command: Mapping[str, Any]) -> dict[str, object]:
        store, job = self._opened()
        generation = number(command, "generation")
        keep = retention.Retention(
            number(command, "keep_last"),
            number(command, "keep_every"),
            _texts(command, "restoring"),
            number(command, "grace_s") if "grace_s" in command else retention.GRACE_S,
        )
        if keep.keep_last < 1:
            raise InvalidCommand("keep_last must be 1 or more")
        swept = retention.sweep(store, job, generation, keep, clock.unix_time())
        files = self._filing.sweep(store, job, generation, keep.keep_last)
        return {name: count + getattr(files, name) for name, count in asdict(swept).items()}

    def _notices(self) -> dict[str, object]:
        if self._ask_metadata is None:
            from keepstep.adapters.imds import open_metadata

            self._ask_metadata = open_metadata()
        return self._ask_metadata()


class Server:
    """Takes commands off the line, hands each to its lane, and sends the replies."""

    def __init__(self, line: socket.socket, uploader: Uploader) -> None:
        self._line = line
        self._uploader = uploader
        self._sending = threading.Lock()
        self._slots = threading.BoundedSemaphore(IN_FLIGHT_MAX)
        self._lanes = {lane: ThreadPoolExecutor(1, thread_name_prefix=lane) for lane in set(LANES.values())}

    def serve(self) -> None:
        """Serve until the other end is closed."""
        while True:
            try:
                packet = receive_packet(self._line)
            except (PacketError, ConnectionResetError) as error:
                print(f"keepstep: uploader: {error}", file=sys.stderr, flush=True)
                return
            if packet is None:
                return
            command, fd = packet
            lane = LANES.get(str(command.get("command")), "head")
            self._slots.acquire()  # beyond the limit commands wait in the socket, and the agent notices
            self._lanes[lane].submit(self._answer, command, fd).add_done_callback(_die_of_bugs)

    def _answer(self, command: Mapping[str, Any], fd: int | None) -> None:
        reply: dict[str, object] = {"id": command.get("id"), "ok": True}
        try:
            reply.update(self._uploader.perform(command, fd))
        except InvalidCommand as error:
            reply.update(ok=False, error="invalid", detail=str(error))
        except (StoreError, MalformedDocument, MalformedSlab, ShortSlab) as error:
            reply.update(ok=False, error=_family(error), detail=str(error))
        except (commit.Fenced, commit.StaleStep, restore.CorruptObject, restore.NoRoom, Stuck) as error:
            reply.update(ok=False, error=_family(error), detail=str(error))
        except OSError as error:
            reply.update(ok=False, error="unavailable", detail=f"the slab can not be read or written: {error.strerror}")
        finally:
            if fd is not None:
                os.close(fd)
            self._slots.release()
        with self._sending, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            send_packet(self._line, reply)


def _texts(command: Mapping[str, Any], field: str) -> frozenset[str]:
    values = command.get(field, [])
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise InvalidCommand(f"{field} must be a list of strings")
    return frozenset(values)


def _name(command: Mapping[str, Any]) -> ManifestName:
    return ManifestName(number(command, "generation"), number(command, "step"), _run(command))


def _run(command: Mapping[str, Any]) -> str:
    run = text(command, "run")
    if not is_run(run):
        raise InvalidCommand(f"{run!r} can not be a run's nonce")
    return run


def _family(error: Exception) -> str:
    return next(word for kinds, word in _FAMILIES if isinstance(error, kinds))


def _die_of_bugs(done: Future[None]) -> None:
    error = done.exception()
    if error is not None:
        traceback.print_exception(error)
        sys.stderr.flush()
        os._exit(EXIT_BUG)


def _live_and_die_with(parent: int | None) -> None:
    """Be killed when the parent ends, and end now if it did already."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(0)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Serve the socket that was inherited; the process ends with it, whatever is under way."""
    parser = argparse.ArgumentParser(prog="keepstep.app.uploader")
    parser.add_argument("--socket-fd", type=int, required=True)
    parser.add_argument("--parent-pid", type=int)
    options = parser.parse_args(arguments)
    _live_and_die_with(options.parent_pid)
    # What the terminal or the platform sends is for the agent to answer: it decides what is still to be saved.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.nice(NICENESS)
    with socket.socket(fileno=options.socket_fd) as line:
        line.set_inheritable(False)
        Server(line, Uploader()).serve()
    os._exit(0)


if __name__ == "__main__":
    main()
