"""A store in S3, or in what speaks its language: conditional writes, CRC32C that the service checks, parts.

Where the endpoint, region and credentials come from is botocore's business (environment, profile, instance role).
Each request is tried twice by botocore; whoever wants more patience wraps the store.
Source: S3's API model for conditional writes (412 decided, 409 again) and full-object CRC32C.
"""

from __future__ import annotations

import base64
import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import boto3
from awscrt import checksums
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    NoCredentialsError,
    NoRegionError,
    ParamValidationError,
    PartialCredentialsError,
    ProfileNotFound,
)
from urllib3.exceptions import HTTPError

from keepstep.core.values import frozen
from keepstep.ports.store import (
    Body,
    ChecksumMismatch,
    Chunks,
    Conflict,
    NotFound,
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
PART_BYTES_MIN = 16 << 20
PARTS_MAX = 10_000
READ_BYTES = 1 << 20
CONNECT_TIMEOUT_S = 5
READ_TIMEOUT_S = 30

_ABSENT = {"404", "NoSuchKey", "NotFound"}
_UNDECIDED = {"409", "ConditionalRequestConflict", "OperationAborted"}
_FAILED = {"412", "PreconditionFailed"}
_PASSING = {
    "RequestTimeout", "RequestTimeTooSkewed", "SlowDown", "Throttling", "ThrottlingException", "InternalError",
    "TooManyRequestsException", "ServiceUnavailable", "BadDigest", "XAmzContentChecksumMismatch", "IncompleteBody",
    "NoSuchUpload", "ExpiredToken", "ExpiredTokenException",
}  # fmt: skip


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


@frozen
class _Part:
    number: int
    data: memoryview
    crc: int
    memory: bytearray
    """What `data` lies in."""


class _Bytes:
    """A request's body that is read where it lies; io.BytesIO would copy it."""

    def __init__(self, data: memoryview, pace: Callable[[int], None]) -> None:
        self._data, self._at, self._pace = data, 0, pace

    def __len__(self) -> int:
        return len(self._data)

    def read(self, size: int | None = None) -> memoryview:
        begin = self._at
        self._at = len(self._data) if size is None or size < 0 else min(len(self._data), begin + size)
        self._pace(self._at - begin)
        return self._data[begin : self._at]

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._data)}[whence]
        return self._at

    def tell(self) -> int:
        return self._at


class S3Store:
    """Objects below `prefix` of a bucket; keys are relative to it."""

    def __init__(self, client: Any, bucket: str, prefix: str = "", options: S3Options | None = None) -> None:
        self._client, self._options = client, options or S3Options()
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
        config = Config(
            connect_timeout=CONNECT_TIMEOUT_S,
            read_timeout=READ_TIMEOUT_S,
            retries={"mode": "standard", "total_max_attempts": 2},
            max_pool_connections=max(16, 8 + (options or S3Options()).parts_in_flight),
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={"payload_signing_enabled": True},
        )
        with _translated(f"s3://{bucket}"):
            try:
                client = boto3.client("s3", endpoint_url=endpoint, config=config)
            except ValueError as error:
                raise StoreRefused(f"s3://{bucket}: {error}") from error
        if client.meta.endpoint_url.startswith("https:"):
            # TLS has seen to it already. A SHA-256 of all that goes up is a fifth of what an upload costs.
            client.meta.config.s3["payload_signing_enabled"] = False
        return cls(client, bucket, prefix, options)

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
        data = b"".join(body_chunks(body))
        crc = checksums.crc32c(data)
        if len(data) != body_size(body) or crc32c not in (None, crc):
            raise ChecksumMismatch(f"{key}: {len(data)} bytes with CRC32C {crc:08x} are not what was announced")
        with _translated(key, absent=PreconditionFailed if if_match is not None else StoreRefused):
            sent = _Bytes(memoryview(data), self._options.pace)
            encrypted = self._options.encrypted()
            answer = self._client.put_object(**where, **encrypted, Body=sent, ChecksumCRC32C=_encode(crc), **conditions)
        return str(answer["ETag"])

    def get(self, key: str, start: int = 0, size: int | None = None) -> Iterator[bytes]:
        if size == 0:
            self.stat(key)
            return
        ranged = {"Range": f"bytes={start}-{'' if size is None else start + size - 1}"} if start or size else {}
        with _translated(key):
            try:
                answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + key, **ranged)
            except ClientError as error:
                if _code(error) == "InvalidRange":
                    return
                raise
        with contextlib.closing(answer["Body"]) as stream:
            while True:
                with _translated(key):
                    piece = stream.read(READ_BYTES)
                if not piece:
                    return
                yield piece

    def read(self, key: str, limit_bytes: int) -> bytes:
        with _translated(key):
            answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + key, ChecksumMode="ENABLED")
            # The client compares the sums when it comes to the end of what is read.
            with contextlib.closing(answer["Body"]) as stream:
                return joined(iter(lambda: stream.read(READ_BYTES), b""), key, limit_bytes)

    def stat(self, key: str) -> ObjectStat:
        with _translated(key):
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
        with _translated(key, absent=PreconditionFailed):
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
                if _code(error) != "NotImplemented":
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
        with _translated(key):
            begun = self._client.create_multipart_upload(
                **where, **self._options.encrypted(), ChecksumAlgorithm="CRC32C", ChecksumType="FULL_OBJECT"
            )
        upload = begun["UploadId"]
        finished = False
        try:
            parts, crc = self._send_parts(where, upload, body)
            if crc32c not in (None, crc):
                raise ChecksumMismatch(f"{key}: CRC32C {crc:08x}, {crc32c:08x} was announced")
            with _translated(key, absent=PreconditionFailed if "IfMatch" in conditions else StoreUnavailable):
                answer = self._client.complete_multipart_upload(
                    **where,
                    UploadId=upload,
                    MultipartUpload={"Parts": parts},
                    ChecksumCRC32C=_encode(crc),
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

        def send(part: _Part) -> dict[str, Any]:
            named = {"PartNumber": part.number, "ChecksumCRC32C": _encode(part.crc)}
            try:
                with _translated(where["Key"], absent=StoreUnavailable):
                    answer = self._client.upload_part(
                        **where, UploadId=upload, Body=_Bytes(part.data, self._options.pace), **named
                    )
            finally:
                memory.put(part.memory)
            return {**named, "ETag": answer["ETag"]}

        with ThreadPoolExecutor(in_flight, thread_name_prefix="part") as senders:
            flying: deque[Future[dict[str, Any]]] = deque()
            for part in _regroup(body, memory):
                while flying and flying[0].done():
                    sent.append(flying.popleft().result())
                crc = checksums.combine_crc32c(crc, part.crc, len(part.data))
                total += len(part.data)
                flying.append(senders.submit(send, part))
            sent.extend(future.result() for future in flying)
        if total != body.size_bytes:
            raise ChecksumMismatch(f"{where['Key']}: {total} bytes, {body.size_bytes} were announced")
        return sent, crc

    def _abort(self, where: dict[str, str], upload: str) -> None:
        with _translated(where["Key"], absent=StoreUnavailable):
            self._client.abort_multipart_upload(**where, UploadId=upload)


def _regroup(body: Chunks, memory: SimpleQueue[bytearray]) -> Iterator[_Part]:
    """Deliver a body in parts of one size, the last one apart, as the service wants them.

    Each is put together in what `memory` has free, and waits for it: memory that was written to before costs no time
    to be had. Pieces are summed while they are in the processor's cache.
    """
    part_bytes = max(PART_BYTES_MIN, -(-body.size_bytes // PARTS_MAX))
    number, at, crc, held = 1, 0, 0, bytearray()
    for chunk in body:
        rest = memoryview(chunk)
        while rest:
            if not at:
                held = memory.get()
                if not held:
                    held.extend(bytes(min(part_bytes, body.size_bytes)))
            piece = rest[: part_bytes - at]
            held[at : at + len(piece)] = piece
            crc, at, rest = checksums.crc32c(piece, crc), at + len(piece), rest[len(piece) :]
            if at == part_bytes:
                yield _Part(number, memoryview(held)[:at], crc, held)
                number, at, crc = number + 1, 0, 0
    if at:
        yield _Part(number, memoryview(held)[:at], crc, held)


def _encode(crc: int) -> str:
    return base64.b64encode(crc.to_bytes(4, "big")).decode()


def _pages(what: str, pages: Any) -> Iterator[dict[str, Any]]:
    remaining = iter(pages)
    while True:
        with _translated(what, absent=StoreRefused):
            page = next(remaining, None)
        if page is None:
            return
        yield page


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _store_error(what: str, error: ClientError, absent: type[StoreError]) -> StoreError:
    code, status = _code(error), int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    if code in _ABSENT:
        kind = absent
    elif code in _FAILED:
        kind = PreconditionFailed
    elif code in _UNDECIDED:
        kind = Conflict
    elif code in _PASSING or (status >= 500 and status != 501) or status == 429:
        kind = StoreUnavailable
    else:
        kind = StoreRefused
    return kind(f"{what}: {error}")


@contextlib.contextmanager
def _translated(what: str, absent: type[StoreError] = NotFound) -> Iterator[None]:
    try:
        yield
    except ClientError as error:
        raise _store_error(what, error, absent) from error
    except (NoCredentialsError, PartialCredentialsError, NoRegionError, ParamValidationError, ProfileNotFound) as error:
        raise StoreRefused(f"{what}: {error}") from error
    except (BotoCoreError, HTTPError, OSError) as error:
        raise StoreUnavailable(f"{what}: {error}") from error
