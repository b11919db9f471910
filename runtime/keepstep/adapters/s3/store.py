"""A store in S3, or in what speaks its language: conditional writes, CRC32C that the service checks, parts.

Where the endpoint, region and credentials come from is botocore's business (environment, profile, instance role).
Each request is tried twice by botocore; whoever wants more patience wraps the store. A part of a large object is tried
more often, and ever slower where the service wants that (botocore's "adaptive"), by a client of its own: that mode
slows down whatever its client asks for, and a commit must not wait for it.
Source: S3's API model for conditional writes (412 decided, 409 again) and full-object CRC32C.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import boto3
from awscrt import checksums
from botocore.config import Config
from botocore.exceptions import ClientError

from keepstep.adapters.s3.errors import code_of, translated
from keepstep.adapters.s3.parts import Part, SentBytes, encode_crc, regroup
from keepstep.core.values import frozen
from keepstep.ports.store import (
    Body,
    ChecksumMismatch,
    Chunks,
    ObjectStat,
    PreconditionFailed,
    StoreError,
    StoreRefused,
    StoreUnavailable,
    body_chunks,
    body_size,
    joined,
)

SINGLE_PUT_BYTES_MAX = 64 << 20
READ_BYTES = 1 << 20
CONNECT_TIMEOUT_S = 5
READ_TIMEOUT_S = 30
_ONCE_MORE = {"mode": "standard", "total_max_attempts": 2}
_ADAPTIVE = {"mode": "adaptive", "total_max_attempts": 8}
_PART_ATTEMPTS = 3
"""For a part of which the service says what botocore takes for final: that it arrived with other bytes."""


def _unhindered(size_bytes: int) -> None:
    """Sends at once."""


@frozen
class S3Options:
    """How objects are written.

    Attributes:
        encryption: `bucket` (by the bucket's own rule), `kms` (the account's key), or a KMS key's id, ARN or alias.
        parts_in_flight: parts of a large object that are sent at the same time, each held in memory.
        pace: called with the number of bytes before they are sent; returns once they may be.
    """

    encryption: str = "bucket"
    parts_in_flight: int = 4
    pace: Callable[[int], None] = _unhindered

    def encrypted(self) -> dict[str, str]:
        """What a request that makes an object says of its encryption."""
        if self.encryption == "bucket":
            return {}
        key = {} if self.encryption == "kms" else {"SSEKMSKeyId": self.encryption}
        return {"ServerSideEncryption": "aws:kms", **key}


def _open_client(endpoint: str | None, retries: dict[str, Any], connections: int) -> Any:
    config = Config(
        connect_timeout=CONNECT_TIMEOUT_S,
        read_timeout=READ_TIMEOUT_S,
        retries=retries,
        max_pool_connections=connections,
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"payload_signing_enabled": True},
    )
    client = boto3.client("s3", endpoint_url=endpoint, config=config)
    if client.meta.endpoint_url.startswith("https:"):
        # TLS has seen to it already. A SHA-256 of all that goes up is a fifth of what an upload costs.
        client.meta.config.s3["payload_signing_enabled"] = False
    return client


class S3Store:
    """Objects below `prefix` of a bucket; keys are relative to it."""

    def __init__(
        self, client: Any, bucket: str, prefix: str = "", options: S3Options | None = None, parts: Any = None
    ) -> None:
        self._client, self._options = client, options or S3Options()
        self._parts = parts or client
        self._bucket = bucket
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""

    @classmethod
    def connect(
        cls, bucket: str, prefix: str = "", endpoint: str | None = None, options: S3Options | None = None
    ) -> S3Store:
        """Open a store; nothing is asked of it yet.

        Raises:
            StoreRefused: the client's configuration can not be.
        """
        in_flight = (options or S3Options()).parts_in_flight
        with translated(f"s3://{bucket}"):
            try:
                client = _open_client(endpoint, _ONCE_MORE, max(16, 8 + in_flight))
                parts = _open_client(endpoint, _ADAPTIVE, in_flight)
            except ValueError as error:
                raise StoreRefused(f"s3://{bucket}: {error}") from error
        return cls(client, bucket, prefix, options, parts)

    def put(
        self,
        key: str,
        body: Body,
        *,
        if_absent: bool = False,
        if_match: str | None = None,
        crc32c: int | None = None,
    ) -> str:
        where = {"Bucket": self._bucket, "Key": self._prefix + key}
        conditions = {"IfNoneMatch": "*"} if if_absent else {}
        if if_match is not None:
            conditions["IfMatch"] = if_match
        if not isinstance(body, bytes) and body.size_bytes > SINGLE_PUT_BYTES_MAX:
            return self._put_parts(where, body, conditions, crc32c)
        data = _in_one_piece(body)
        crc = checksums.crc32c(data)
        if len(data) != body_size(body) or crc32c not in (None, crc):
            raise ChecksumMismatch(f"{key}: {len(data)} bytes with CRC32C {crc:08x} are not what was announced")
        with translated(key, absent=PreconditionFailed if if_match is not None else StoreRefused):
            sent = SentBytes(data, self._options.pace)
            encrypted = self._options.encrypted()
            answer = self._client.put_object(
                **where, **encrypted, Body=sent, ChecksumCRC32C=encode_crc(crc), **conditions
            )
        return str(answer["ETag"])

    def get(self, key: str, start: int = 0, size: int | None = None) -> Iterator[bytes]:
        if size == 0:
            self.stat(key)
            return
        ranged = {"Range": f"bytes={start}-{'' if size is None else start + size - 1}"} if start or size else {}
        with translated(key):
            try:
                answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + key, **ranged)
            except ClientError as error:
                if code_of(error) == "InvalidRange":
                    return
                raise
        with contextlib.closing(answer["Body"]) as stream:
            while True:
                with translated(key):
                    piece = stream.read(READ_BYTES)
                if not piece:
                    return
                yield piece

    def read(self, key: str, limit_bytes: int) -> bytes:
        with translated(key):
            answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + key, ChecksumMode="ENABLED")
            # The client compares the sums when it comes to the end of what is read.
            with contextlib.closing(answer["Body"]) as stream:
                return joined(iter(lambda: stream.read(READ_BYTES), b""), key, limit_bytes)

    def stat(self, key: str) -> ObjectStat:
        with translated(key):
            answer = self._client.head_object(Bucket=self._bucket, Key=self._prefix + key)
        return ObjectStat(int(answer["ContentLength"]), str(answer["ETag"]), answer["LastModified"].timestamp())

    def list(self, prefix: str) -> Iterator[str]:
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=self._prefix + prefix
        )
        for page in _pages(prefix, pages):
            for found in page.get("Contents", ()):
                yield str(found["Key"])[len(self._prefix) :]

    def delete(self, key: str, *, if_match: str | None = None) -> None:
        where = {"Bucket": self._bucket, "Key": self._prefix + key}
        with translated(key, absent=PreconditionFailed):
            if if_match is None:
                self._client.delete_object(**where)
                return
            # Not every store that knows conditional writes knows conditional deletes. Some ignore them, so look first;
            # some refuse them, and then having looked has to do.
            if self._client.head_object(**where)["ETag"] != if_match:
                raise PreconditionFailed(f"{key} is another object than the one that was seen")
            try:
                self._client.delete_object(**where, IfMatch=if_match)
            except ClientError as error:
                if code_of(error) != "NotImplemented":
                    raise
                self._client.delete_object(**where)

    def discard_unfinished(self, prefix: str, before_unix: float) -> int:
        """Abort multipart uploads that were begun before then: they cost money until somebody does."""
        discarded = 0
        pages = self._client.get_paginator("list_multipart_uploads").paginate(
            Bucket=self._bucket, Prefix=self._prefix + prefix
        )
        for page in _pages(prefix, pages):
            for found in page.get("Uploads", ()):
                if found["Initiated"].timestamp() < before_unix:
                    self._abort({"Bucket": self._bucket, "Key": found["Key"]}, found["UploadId"])
                    discarded += 1
        return discarded

    def _put_parts(self, where: dict[str, str], body: Chunks, conditions: dict[str, str], crc32c: int | None) -> str:
        key = where["Key"]
        with translated(key):
            begun = self._client.create_multipart_upload(
                **where, **self._options.encrypted(), ChecksumAlgorithm="CRC32C", ChecksumType="FULL_OBJECT"
            )
        upload = begun["UploadId"]
        finished = False
        try:
            parts, crc = self._send_parts(where, upload, body)
            if crc32c not in (None, crc):
                raise ChecksumMismatch(f"{key}: CRC32C {crc:08x}, {crc32c:08x} was announced")
            with translated(key, absent=PreconditionFailed if "IfMatch" in conditions else StoreUnavailable):
                answer = self._client.complete_multipart_upload(
                    **where,
                    UploadId=upload,
                    MultipartUpload={"Parts": parts},
                    ChecksumCRC32C=encode_crc(crc),
                    ChecksumType="FULL_OBJECT",
                    **conditions,
                )
            finished = True
        finally:
            if not finished:
                with contextlib.suppress(StoreError):  # what stays behind is swept after a grace
                    self._abort(where, upload)
        return str(answer["ETag"])

    def _send_parts(self, where: dict[str, str], upload: str, body: Chunks) -> tuple[Sequence[dict[str, Any]], int]:
        """Send all parts, a few at a time, so that only those are in memory; returns them and the CRC of the whole."""
        sent: list[dict[str, Any]] = []
        crc, total = 0, 0
        memory = SimpleQueue[bytearray]()
        in_flight = self._options.parts_in_flight
        for _ in range(in_flight + 1):
            memory.put(bytearray())

        def send(part: Part) -> dict[str, Any]:
            try:
                return self._send_part(where, upload, part)
            finally:
                memory.put(part.memory)

        with ThreadPoolExecutor(in_flight, thread_name_prefix="part") as senders:
            flying: deque[Future[dict[str, Any]]] = deque()
            for part in regroup(body, memory):
                while flying and flying[0].done():
                    sent.append(flying.popleft().result())
                crc = checksums.combine_crc32c(crc, part.crc, len(part.data))
                total += len(part.data)
                flying.append(senders.submit(send, part))
            sent.extend(future.result() for future in flying)
        if total != body.size_bytes:
            raise ChecksumMismatch(f"{where['Key']}: {total} bytes, {body.size_bytes} were announced")
        return sent, crc

    def _send_part(self, where: dict[str, str], upload: str, part: Part) -> dict[str, Any]:
        named = {"PartNumber": part.number, "ChecksumCRC32C": encode_crc(part.crc)}
        for left in reversed(range(_PART_ATTEMPTS)):
            sent = SentBytes(part.data, self._options.pace)
            try:
                with translated(where["Key"], absent=StoreUnavailable):
                    answer = self._parts.upload_part(**where, UploadId=upload, Body=sent, **named)
                break
            except StoreUnavailable:
                if not left:
                    raise
        return {**named, "ETag": answer["ETag"]}

    def _abort(self, where: dict[str, str], upload: str) -> None:
        with translated(where["Key"], absent=StoreUnavailable):
            self._client.abort_multipart_upload(**where, UploadId=upload)


def _pages(what: str, pages: Any) -> Iterator[dict[str, Any]]:
    remaining = iter(pages)
    while True:
        with translated(what, absent=StoreRefused):
            page = next(remaining, None)
        if page is None:
            return
        yield page


def _in_one_piece(body: Body) -> memoryview:
    """A body's bytes, as many as it has, in memory that holds nothing twice."""
    if isinstance(body, bytes):
        return memoryview(body)
    whole, at = bytearray(body_size(body)), 0
    for piece in body_chunks(body):
        whole[at : at + len(piece)] = piece
        at += len(piece)
    del whole[at:]
    return memoryview(whole)
