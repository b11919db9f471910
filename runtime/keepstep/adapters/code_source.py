"""Where a job's code and packages come from: an object in S3, a CodeArtifact repository; for a process of its own.

Where credentials come from is botocore's business (environment, profile, instance role).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import boto3
from boto3.exceptions import Boto3Error
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, ParamValidationError

from keepstep.errors import ConfigError, StoreRefusedError

_CONFIG = Config(retries={"mode": "standard", "total_max_attempts": 5}, connect_timeout=10, read_timeout=60)
_REPOSITORY = re.compile(
    r"arn:[^:]+:codeartifact:(?P<region>[^:]+):(?P<owner>[^:]+):repository/(?P<domain>[^/]+)/(?P<name>.+)"
)
_OF_THE_MOMENT = (408, 429)
_TRY_AGAIN = "start the job again once it answers"
ARN_VARIABLE = "CA_REPOSITORY_ARN"


def download(url: str, to: Path, region: str | None, endpoint: str | None) -> None:
    """Fetch one object into a file.

    Raises:
        ConfigError: the URL names no object, or none that this job may read.
        StoreRefusedError: S3 does not answer.
    """
    bucket, _, key = url.removeprefix("s3://").partition("/")
    if not bucket or not key:
        raise ConfigError(f"found {url}", "s3://bucket/key of an archive")
    try:
        client: Any = boto3.client("s3", region_name=region, endpoint_url=endpoint, config=_CONFIG)
        client.download_file(bucket, key, str(to))
    except ClientError as error:
        raise _named(error, url, "an archive that this job's role may read") from None
    except (ParamValidationError, ValueError) as error:
        raise ConfigError(f"{url}: {error}", "s3://bucket/key of an archive, and an endpoint that is a URL") from None
    except (BotoCoreError, Boto3Error) as error:
        raise StoreRefusedError(f"{url}: {error}", _TRY_AGAIN) from None


def package_index(arn: str) -> str:
    """The URL of a CodeArtifact repository for pip, with the password in it; good for twelve hours.

    Raises:
        ConfigError: the ARN names no repository that this job may read.
        StoreRefusedError: CodeArtifact does not answer.
    """
    found = _REPOSITORY.fullmatch(arn)
    if found is None:
        wanted = "arn:aws:codeartifact:REGION:ACCOUNT:repository/DOMAIN/NAME"
        raise ConfigError(f"found {arn}", wanted, key=ARN_VARIABLE)
    where = {"domain": found["domain"], "domainOwner": found["owner"]}
    try:
        client: Any = boto3.client("codeartifact", region_name=found["region"], config=_CONFIG)
        token = client.get_authorization_token(**where)["authorizationToken"]
        answer = client.get_repository_endpoint(**where, repository=found["name"], format="pypi")
    except ClientError as error:
        raise _named(error, arn, "a repository that this job's role may read") from None
    except BotoCoreError as error:
        raise StoreRefusedError(f"{arn}: {error}", _TRY_AGAIN) from None
    endpoint = urlsplit(str(answer["repositoryEndpoint"]))
    path = endpoint.path.rstrip("/")
    return f"{endpoint.scheme}://aws:{quote(token, safe='')}@{endpoint.netloc}{path}/simple/"


def _named(error: ClientError, what: str, wanted: str) -> ConfigError | StoreRefusedError:
    """A refusal for good is the user's to mend, one of the moment is not."""
    told = f"{what}: {error}"
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") or 0)
    is_for_good = 400 <= status < 500 and status not in _OF_THE_MOMENT
    return ConfigError(told, wanted) if is_for_good else StoreRefusedError(told, _TRY_AGAIN)
