"""One engine, one image and one store for all tests with containers."""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import Iterator

import boto3
import pytest

from tests.containers import engine as engines
from tests.containers.jobs import Cluster
from tests.support.s3 import CREDENTIALS

NETWORK = "keepstep-test"
_SHOWN = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION", "AWS_EC2_METADATA_DISABLED")


@pytest.fixture(scope="session")
def engine() -> Iterator[engines.Engine]:
    """With the image built; what can not be built is a failure, a machine that can not run an engine is none."""
    with contextlib.ExitStack() as kept:
        try:
            found = kept.enter_context(engines.engine())
        except engines.NoEngineError as error:
            pytest.skip(str(error))
        started = time.monotonic()
        engines.images(found)
        print(f"images: built in {time.monotonic() - started:.0f} s")
        yield found


@pytest.fixture(scope="session")
def cluster(engine: engines.Engine) -> Iterator[Cluster]:
    """A network of its own, and S3 on the machine that it hangs on."""
    from moto.server import ThreadedMotoServer

    if engine.run("network", "inspect", NETWORK, check=False).returncode != 0:
        engine.run("network", "create", NETWORK)
    gateway = engine.ask("network", "inspect", "--format", "{{(index .IPAM.Config 0).Gateway}}", NETWORK)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address=gateway, port=0, verbose=False)
    server.start()
    try:
        endpoint = f"http://{gateway}:{server.get_host_and_port()[1]}"
        yield Cluster(engine, NETWORK, endpoint, {name: CREDENTIALS[name] for name in _SHOWN})
    finally:
        server.stop()


@pytest.fixture
def store(cluster: Cluster) -> str:
    """A bucket of the test's own."""
    bucket = f"bucket-{uuid.uuid4().hex[:12]}"
    client = boto3.client(
        "s3",
        endpoint_url=cluster.endpoint,
        aws_access_key_id=cluster.credentials["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=cluster.credentials["AWS_SECRET_ACCESS_KEY"],
        region_name=cluster.credentials["AWS_DEFAULT_REGION"],
    )
    client.create_bucket(Bucket=bucket)
    return f"s3://{bucket}/job"
