"""How objects are written to S3: encrypted with which key, how many parts at a time, how fast."""

from __future__ import annotations

import threading
import uuid

import pytest
from awscrt import checksums
from botocore.exceptions import ClientError

from keepstep.adapters.s3 import SINGLE_PUT_BYTES_MAX, S3Options, S3Store
from tests.support.s3 import bucket_store, s3_server

server = pytest.fixture(scope="module")(s3_server)
KEY = "arn:aws:kms:us-east-1:123456789012:key/1234abcd-12ab-34cd-56ef-1234567890ab"


class Large:
    """More than goes up in one piece."""

    size_bytes = SINGLE_PUT_BYTES_MAX + 1

    def __iter__(self):
        piece = bytes(range(256)) * 4096
        left = self.size_bytes
        while left:
            yield piece[:left]
            left -= len(piece[:left])


def store_of(server: str, options: S3Options) -> S3Store:
    bucket = f"b{uuid.uuid4().hex[:12]}"
    bucket_store(server, bucket)
    return S3Store.connect(bucket, "", server, options)


@pytest.mark.parametrize(
    ("encryption", "said"),
    [
        ("bucket", (None, None)),
        ("kms", ("aws:kms", None)),
        (KEY, ("aws:kms", KEY)),
        ("alias/own", ("aws:kms", "alias/own")),
    ],
)
@pytest.mark.parametrize("body", [b"small", Large()], ids=["small", "large"])
def test_objects_are_encrypted_as_wanted(server, encryption, said, body):
    store = store_of(server, S3Options(encryption))
    store.put("job/a", body, if_absent=True)
    head = store._client.head_object(Bucket=store._bucket, Key="job/a")
    found = head.get("ServerSideEncryption"), head.get("SSEKMSKeyId")
    assert found[0] == said[0] or (said[0] is None and found[0] == "AES256")
    assert said[1] is None or said[1] in str(found[1])


def test_no_more_parts_are_in_flight_than_wanted(server):
    lock, flying, most = threading.Lock(), set(), [0]
    store = store_of(server, S3Options(parts_in_flight=2))
    send = store._parts.upload_part

    def upload_part(**what):
        with lock:
            flying.add(what["PartNumber"])
            most[0] = max(most[0], len(flying))
        try:
            return send(**what)
        finally:
            with lock:
                flying.discard(what["PartNumber"])

    store._parts.upload_part = upload_part
    store.put("job/a", Large())
    assert 1 <= most[0] <= 2
    assert store.stat("job/a").size_bytes == Large.size_bytes


def test_a_part_that_fails_is_sent_again_and_no_other(server):
    store, sent, begun = store_of(server, S3Options()), [], []
    send, begin = store._parts.upload_part, store._client.create_multipart_upload

    def upload_part(**what):
        sent.append(what["PartNumber"])
        if what["PartNumber"] == 2 and sent.count(2) < 3:
            raise ClientError({"Error": {"Code": "BadDigest"}}, "UploadPart")
        return send(**what)

    def create_multipart_upload(**what):
        begun.append(what["Key"])
        return begin(**what)

    store._parts.upload_part, store._client.create_multipart_upload = upload_part, create_multipart_upload
    store.put("job/a", Large())
    assert store.stat("job/a").size_bytes == Large.size_bytes
    assert begun == ["job/a"]
    assert sorted(sent) == [1, 2, 2, 2, 3, 4, 5]


def test_what_is_slowed_down_for_parts_is_nothing_else(server):
    """The service's wish to be asked less often holds for the client that heard it."""
    store = store_of(server, S3Options())
    modes = [client.meta.config.retries["mode"] for client in (store._client, store._parts)]
    assert modes == ["standard", "adaptive"]


@pytest.mark.parametrize("body", [b"x" * 100_000, Large()], ids=["small", "large"])
def test_every_byte_that_is_sent_is_asked_for(server, body):
    asked = []
    store = store_of(server, S3Options(pace=asked.append))
    crc = checksums.crc32c(b"".join(body)) if isinstance(body, Large) else checksums.crc32c(body)
    store.put("job/a", body, crc32c=crc)
    size = body.size_bytes if isinstance(body, Large) else len(body)
    assert sum(asked) >= size  # twice without TLS, where what is sent is summed before
    assert store.stat("job/a").size_bytes == size
