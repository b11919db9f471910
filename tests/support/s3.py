"""An S3 server for tests, and stores in it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

from keepstep.adapters.s3 import S3Store
from tests.support.localstack import localstack

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "NO_PROXY": "127.0.0.1",
    "no_proxy": "127.0.0.1",
}


def s3_server() -> Iterator[str]:
    """Fixture: serve S3 in a thread, with made-up credentials in the environment; gives the endpoint."""
    from moto.server import ThreadedMotoServer

    with _credentials():
        server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        try:
            yield f"http://{host}:{port}"
        finally:
            server.stop()


def localstack_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Fixture: LocalStack in a process of its own, likewise."""
    with _credentials(), localstack(tmp_path_factory.mktemp("localstack")) as endpoint:
        yield endpoint


@contextlib.contextmanager
def _credentials() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)
        for name in [name for name in os.environ if name in {"AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_SESSION_TOKEN"}]:
            patch.delenv(name)
        yield


def bucket_store(endpoint: str, bucket: str, prefix: str = "", make: bool = True) -> S3Store:
    """A store in a bucket of its own."""
    store = S3Store.connect(bucket, prefix, endpoint)
    if make:
        store._client.create_bucket(Bucket=bucket)
    return store
