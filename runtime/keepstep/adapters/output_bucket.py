"""Where the platform wants intermediate output: files under their own names, below a prefix in S3."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
from boto3.exceptions import Boto3Error
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from keepstep.errors import StoreRefusedError

_CONFIG = Config(retries={"mode": "adaptive", "total_max_attempts": 5}, connect_timeout=10, read_timeout=60)


class OutputBucket:
    """Takes files, one after the other."""

    def __init__(self, url: str, region: str | None, endpoint: str | None) -> None:
        """Args: url: s3://bucket/prefix."""
        where = urlsplit(url)
        self._bucket, self._prefix = where.netloc, where.path.strip("/")
        self._client: Any = boto3.client("s3", region_name=region, endpoint_url=endpoint, config=_CONFIG)

    def put(self, path: Path, name: str) -> None:
        """Upload a file under a name below the prefix, over what is there.

        Raises:
            StoreRefusedError: S3 does not take it, now or at all.
            OSError: it can not be read.
        """
        key = f"{self._prefix}/{name}" if self._prefix else name
        try:
            self._client.upload_file(str(path), self._bucket, key)
        except (ClientError, BotoCoreError, Boto3Error) as error:
            raise StoreRefusedError(f"s3://{self._bucket}/{key}: {error}") from error
