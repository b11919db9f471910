"""The uploader as the fold sees it: commands out, events back, and a new process where one died."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from keepstep.adapters.clock import monotonic_ns, sleep
from keepstep.adapters.uploader import UploaderClient, UploaderGone
from keepstep.adapters.worker_link import WorkerLink
from keepstep.core import actions as a
from keepstep.core import events as e
from keepstep.core.codec import Undecodable, decode_charges, encode_charges
from keepstep.core.events import Event, Head, SlabSeal
from keepstep.core.failures import Charges
from keepstep.core.policy import Policy
from keepstep.core.records import StoredObject
from keepstep.core.values import frozen
from keepstep.intake.contract import Contract
from keepstep.ports import TlsFiles

_LOOKS, _LOOK_S = 6, 5.0
"""So often, and so far apart, an uploader is found silent before it is ended. One that reads its commands answers soon,
however busy it is: each kind of them has a thread of its own.
"""
_RESTART_S = 0.2
_STORE_AGAIN_S = 2.0
_CHARGES = "charges.json"
"""The place in the store that they are noted at."""
_DECIDED = ("corrupt", "missing", "fenced", "conflict", "stuck")
"""Errors that mean something of their own to whoever asked."""


@frozen
class Giving:
    """With what the uploader gives other hosts the bytes of slabs: a socket that listens, and this node's files.

    Without files it gives nothing, and answers where a line is measured.
    """

    listener: socket.socket
    tls: TlsFiles | None


def local_folder(wanted: str, contract: Contract) -> str:
    """The folder for copies of what is uploaded: as the policy says, or the platform's, if any; empty for none."""
    if wanted == "auto":
        cache = contract.paths.warm_pool_cache
        return str(cache / "keepstep") if cache.is_dir() else ""
    return "" if wanted == "off" else wanted


class Storing:
    """One node's uploader."""

    def __init__(
        self,
        job: str,
        store: str | None,
        policy: Policy,
        post: Callable[[Event], None],
        log: Callable[[str], None],
        local: str = "",
    ) -> None:
        self._job, self._store, self._policy, self._post, self._log = job, store, policy, post, log
        self._local = local
        self._giving: Giving | None = None
        self._wire_fd = -1
        self._client = UploaderClient(self._died)
        self._closing = False
        self._again = asyncio.Event()
        self._opened = asyncio.Event()

    @property
    def pid(self) -> int | None:
        return self._client.pid

    def give(self, giving: Giving, wire_fd: int) -> None:
        """Have other hosts given what is in this one's slabs; say so before `run`.

        Args:
            wire_fd: the control page, which says whether a slab is still what it was.
        """
        self._giving, self._wire_fd = giving, wire_fd

    async def run(self) -> None:
        """Keep an uploader running. Never ends."""
        await asyncio.gather(self._keep(), self._mind())

    async def _mind(self) -> None:
        """End an uploader that answers nothing any more: what was asked of it is asked of the next one."""
        while True:
            await sleep(_LOOK_S)
            answer = asyncio.ensure_future(self._call({"command": "ping"}))
            looks = 0
            while looks < _LOOKS and not answer.done():  # one may be over because the agent itself was held up
                await asyncio.wait({answer}, timeout=_LOOK_S)
                looks += 1
            if answer.done():
                answer.exception()  # UploaderGone: another one is started anyway
                continue
            self._log(f"the uploader has not answered for {_LOOKS * _LOOK_S:.0f} s")
            answer.cancel()
            await self._client.stop()

    async def _keep(self) -> None:
        while True:
            self._again.clear()
            try:
                await self._client.start()
                await self._listen()
                if self._store is not None:
                    wanted = self._policy.checkpoint.s3
                    s3 = {"encryption": wanted.encryption, "parts_in_flight": wanted.parts_in_flight}
                    opening = {"store": self._store, "job": self._job, "s3": {**s3, "bytes_per_s": wanted.upload_rate}}
                    reply = await self._call({"command": "open", **opening, "local": self._local})
                    if reply.get("error") == "refused":
                        self._post(e.StoreRefused("open", f"{self._store}: {reply.get('detail')}"))
                    elif reply.get("ok"):
                        self._opened.set()
            except (OSError, UploaderGone) as error:
                self._log(f"uploader: {error}")
            else:
                await self._again.wait()
            await sleep(_RESTART_S)

    async def _listen(self) -> None:
        giving = self._giving
        if giving is None:
            return
        tls = giving.tls
        files = {} if tls is None else {"ca": str(tls.ca), "cert": str(tls.cert), "key": str(tls.key)}
        await self._call({"command": "seals"}, self._wire_fd)
        await self._call({"command": "listen", **files}, giving.listener.fileno())

    async def _offer(self, slab: int, fd: int, step: int, digest: str, size_bytes: int) -> None:
        """Let other hosts have a verified slab; where that fails they go to the store."""
        if self._giving is None or self._giving.tls is None:
            return
        command = {"command": "offer", "slab": slab, "step": step, "digest": digest, "size_bytes": size_bytes}
        try:
            reply = await self._call(command, fd)
        except UploaderGone:
            return
        if not reply.get("ok"):
            self._log(f"slab {slab} is not offered to other hosts: {reply.get('detail')}")

    async def close(self) -> None:
        self._closing = True
        await self._client.stop()
        if self._giving is not None:
            self._giving.listener.close()

    def _died(self, status: int) -> None:
        if not self._closing:
            self._log(f"uploader ended with {status}; starting another one")
            self._again.set()

    @property
    def has_store(self) -> bool:
        return self._store is not None

    async def ask(self, command: Mapping[str, object]) -> dict[str, Any]:
        """Ask the uploader for what is no business of the fold; UploaderGone where there is none."""
        return await self._call(command)

    async def ask_store(self, command: Mapping[str, object]) -> dict[str, Any]:
        """The same for what wants a store: waits until it is open, asks again where the uploader ends meanwhile."""
        while True:
            await self._opened.wait()
            try:
                return await self._call(command)
            except UploaderGone:
                self._opened.clear()  # until the next one has opened it

    async def _call(self, command: Mapping[str, object], fd: int | None = None) -> dict[str, Any]:
        return await self._client.call(command, fd)

    async def attempt(
        self, operation: str, command: Mapping[str, object], fd: int | None = None
    ) -> dict[str, Any] | None:
        """The reply where it is good; otherwise the event that says why not is posted."""
        try:
            reply = await self._call(command, fd)
        except UploaderGone as error:
            self._post(e.OperationFailed(operation, str(error)))
            return None
        if reply.get("ok"):
            return reply
        family, detail = str(reply.get("error")), str(reply.get("detail"))
        if family == "refused":
            self._post(e.StoreRefused(operation, f"{self._store}: {detail}"))
        elif family not in _DECIDED:
            self._post(e.OperationFailed(operation, f"{family}: {detail}", _STORE_AGAIN_S))
        return reply

    async def verify(self, action: a.VerifySlab, fd: int) -> None:
        """Read a sealed slab once, whole."""
        command = {"command": "verify", "slab": action.slab, "step": action.step, "size_bytes": action.size_bytes}
        reply = await self.attempt(action.operation, command, fd)
        if reply is None:
            return
        if reply.get("ok"):
            digest = str(reply["replicated"])
            await self._offer(action.slab, fd, action.step, digest, action.size_bytes)
            self._post(e.SnapshotVerified(action.operation, action.slab, action.step, digest))
        elif reply.get("error") == "corrupt":
            self._post(e.SnapshotBad(action.operation, action.slab, action.step, str(reply.get("detail"))))

    async def upload(self, action: a.UploadSnapshot, fd: int) -> None:
        """Bring this rank's share into the store."""
        command = {
            "command": "upload", "slab": action.slab, "step": action.step, "generation": action.generation,
            "run": action.run, "rank": action.rank, "world": action.world_size, "size_bytes": action.size_bytes,
        }  # fmt: skip
        reply = await self.attempt(action.operation, command, fd)
        if reply is None:
            return
        if reply.get("ok"):
            objects = tuple(StoredObject(**item) for item in reply["objects"])
            self._post(e.SnapshotUploaded(
                action.operation, action.generation, action.step, str(reply["replicated"]), objects,
                float(reply["seconds"]),
            ))  # fmt: skip
        elif reply.get("error") in _DECIDED:
            self._post(e.OperationFailed(action.operation, str(reply.get("detail")), _STORE_AGAIN_S))

    async def commit(self, action: a.CommitCheckpoint) -> None:
        """Write the manifest and swap HEAD."""
        command = {
            "command": "commit", "generation": action.generation, "step": action.step, "run": action.run,
            "world": action.world_size, "digest": action.digest, "objects": [asdict(item) for item in action.objects],
        }  # fmt: skip
        reply = await self.attempt(action.operation, command)
        if reply is None:
            return
        if reply.get("ok"):
            self._post(e.CheckpointCommitted(
                action.operation, action.generation, action.step, str(reply["manifest"]), float(reply["seconds"])
            ))  # fmt: skip
        elif reply.get("error") in ("fenced", "conflict"):
            self._log(f"commit of step {action.step} refused: {reply.get('detail')}")
            self._post(e.CommitRefused(action.operation, action.generation, action.step))
        elif reply.get("error") in ("corrupt", "missing"):
            self._post(e.OperationFailed(action.operation, str(reply.get("detail")), _STORE_AGAIN_S))

    async def compare(self, action: a.CompareReplicas) -> None:
        """Find the tensors in which hosts differ; where that is not to be had, their digests were told already."""
        command = {
            "command": "compare", "generation": action.generation, "step": action.step, "run": action.run,
            "digests": [digest for _, digest in action.shares],
        }  # fmt: skip
        try:
            reply = await self._call(command)
        except UploaderGone as error:
            reply = {"detail": str(error)}
        if reply.get("ok"):
            differ = tuple((action.shares[int(rank)][0], str(tensor)) for rank, tensor in reply["differ"])
            self._post(e.ReplicasCompared(action.generation, action.step, differ))
        else:
            self._log(f"tensors of step {action.step} not compared: {reply.get('detail')}")

    async def read_head(self, action: a.ReadHead) -> None:
        """Read HEAD, claimed for a generation where that is asked for."""
        command: dict[str, object] = {"command": "head", "without": list(action.without)}
        if action.claim:
            command |= {"claim": action.claim, "run": action.run}
        if action.files:
            command["files"] = True
        reply = await self.attempt(action.operation, command)
        if reply is None:
            return
        if reply.get("ok"):
            raw = reply["head"]
            head = None if raw is None else Head(
                int(raw["generation"]), int(raw["step"]), str(raw["digest"]), str(raw["manifest"] or "")
            )  # fmt: skip
            for manifest in reply.get("unreadable", ()):
                self._log(f"checkpoint {manifest} can not be read; an older one is taken")
            files, generation = str(reply.get("files", "")), int(reply.get("files_generation", 0))
            charges = None if action.claim else await self._recall_charges(action.operation)
            if action.claim or charges is not None:
                self._post(e.HeadRead(action.operation, head, files, generation, charges))
        elif reply.get("error") in _DECIDED:
            self._post(e.OperationFailed(action.operation, str(reply.get("detail")), _STORE_AGAIN_S))

    async def fetch(self, action: a.FetchSnapshot, link: WorkerLink) -> None:
        """Bring a checkpoint into a new slab."""
        fd = os.memfd_create(f"keepstep-slab-{action.slab}", os.MFD_CLOEXEC)
        command = {
            "command": "fetch", "manifest": action.manifest, "rank": action.rank, "world": action.world_size,
            "peers": action.peers, "group": action.group, "place": action.place,
        }  # fmt: skip
        reply = await self.attempt(action.operation, command, fd)
        if reply is not None and reply.get("ok"):
            size_bytes, step = int(reply["size_bytes"]), int(reply["step"])
            await link.adopt(action.slab, fd, size_bytes)
            if link.has_worker:  # which counts its own seals on from those that it found
                await link.drop(action.slab)
                self._post(e.SnapshotUnwanted(action.operation))
                return
            seal = link.seal(action.slab, step, size_bytes, 0, monotonic_ns())
            event = SlabSeal(seal.slab, seal.step, seal.sequence, seal.size_bytes)
            for line in [*(f"{host} gave {size} bytes" for host, size in reply["brought"].items()), *reply["trouble"]]:
                self._log(f"state of step {step}: {line}")
            await self._offer(action.slab, fd, step, str(reply["replicated"]), size_bytes)
            self._post(e.SnapshotFetched(action.operation, event, str(reply["replicated"])))
            return
        os.close(fd)
        if reply is not None and reply.get("error") in ("corrupt", "missing"):
            self._post(e.CheckpointCorrupt(action.operation, action.manifest, str(reply.get("detail"))))

    async def _recall_charges(self, operation: str) -> Charges | None:
        """What the job's earlier attempts were charged with; None where the store could not say it, which is told.

        A note that can not be read counts for none: no job is kept from its start by it.
        """
        reply = await self.attempt(operation, {"command": "recall", "place": _CHARGES})
        if reply is None or (not reply.get("ok") and reply.get("error") not in _DECIDED):
            return None
        try:
            if not reply.get("ok"):
                raise Undecodable(str(reply.get("detail")))
            return Charges() if reply["text"] is None else decode_charges(reply["text"])
        except Undecodable as error:
            self._log(f"the charges of earlier attempts do not count: {error}")
            return Charges()

    async def keep_charges(self, action: a.KeepCharges) -> None:
        """Leave them for the job's next attempt."""
        command = {"command": "note", "place": _CHARGES, "text": encode_charges(action.charges)}
        reply = await self.attempt(action.operation, command)
        if reply is not None and reply.get("ok"):
            self._post(e.ChargesKept(action.operation, action.charges))

    async def sweep(self, action: a.SweepStore) -> None:
        """Delete what retention lets go; what fails is swept the next time."""
        keep = self._policy.checkpoint.keep
        command = {
            "command": "sweep", "keep_last": keep.last, "keep_every": keep.every_steps or 0,
            "generation": action.generation, "restoring": list(action.restoring),
        }  # fmt: skip
        try:
            reply = await self._call(command)
        except UploaderGone:
            return
        if not reply.get("ok"):
            self._log(f"sweep: {reply.get('error')}: {reply.get('detail')}")
