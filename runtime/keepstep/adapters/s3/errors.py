"""What S3, botocore and the line say, as errors of a store."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

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

from keepstep.ports.store import (
    Conflict,
    NotFound,
    PreconditionFailed,
    StoreError,
    StoreRefused,
    StoreUnavailable,
)

_ABSENT = {"404", "NoSuchKey", "NotFound"}
_UNDECIDED = {"409", "ConditionalRequestConflict", "OperationAborted"}
_FAILED = {"412", "PreconditionFailed"}
_PASSING = {
    "RequestTimeout", "RequestTimeTooSkewed", "SlowDown", "Throttling", "ThrottlingException", "InternalError",
    "TooManyRequestsException", "ServiceUnavailable", "BadDigest", "XAmzContentChecksumMismatch", "IncompleteBody",
    "NoSuchUpload", "ExpiredToken", "ExpiredTokenException",
}  # fmt: skip


def code_of(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _store_error(what: str, error: ClientError, absent: type[StoreError]) -> StoreError:
    code, status = code_of(error), int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
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
def translated(what: str, absent: type[StoreError] = NotFound) -> Iterator[None]:
    try:
        yield
    except ClientError as error:
        raise _store_error(what, error, absent) from error
    except (NoCredentialsError, PartialCredentialsError, NoRegionError, ParamValidationError, ProfileNotFound) as error:
        raise StoreRefused(f"{what}: {error}") from error
    except (BotoCoreError, HTTPError, OSError) as error:
        raise StoreUnavailable(f"{what}: {error}") from error
