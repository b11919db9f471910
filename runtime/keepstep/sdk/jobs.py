"""Training jobs at SageMaker: made, followed to their end, their log read along."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import boto3
from botocore.exceptions import BotoCoreError, ClientError

from keepstep.errors import ConfigError, StoreRefusedError

LOG_GROUP = "/aws/sagemaker/TrainingJobs"
ENDED = frozenset({"Completed", "Failed", "Stopped"})
_AGAIN = "start the command again"
_MISSED_MAX = 12
"""A job is followed through as many looks in a row that nobody answers."""


class Jobs:
    """One account's training jobs in one region, with whatever credentials botocore finds."""

    def __init__(self, region: str | None = None, profile: str | None = None) -> None:
        """Make the clients.

        Raises:
            ConfigError: there is no region, or no such profile.
        """
        try:
            session = boto3.Session(region_name=region, profile_name=profile)
            self._sagemaker: Any = session.client("sagemaker")
            self._logs: Any = session.client("logs")
            self._s3: Any = session.client("s3")
        except BotoCoreError as error:
            raise ConfigError(str(error), "a region and credentials", key="--region") from None

    def upload(self, url: str, content: bytes) -> None:
        """Put an object.

        Raises:
            ConfigError, StoreRefusedError: it can not be put.
        """
        bucket, _, key = url.removeprefix("s3://").partition("/")
        _ask(lambda: self._s3.put_object(Bucket=bucket, Key=key, Body=content), url)

    def create(self, request: Mapping[str, Any]) -> str:
        """Make a job, and return its ARN.

        Raises:
            ConfigError, StoreRefusedError: SageMaker does not take it.
        """
        answer = _ask(lambda: self._sagemaker.create_training_job(**request), str(request["TrainingJobName"]))
        return str(answer["TrainingJobArn"])

    def describe(self, name: str) -> dict[str, Any]:
        """What SageMaker says of a job.

        Raises:
            ConfigError, StoreRefusedError: there is none, or nobody answers.
        """
        return _ask(lambda: self._sagemaker.describe_training_job(TrainingJobName=name), name)

    def follow(self, name: str, say: Callable[[str], None], wait: Callable[[], None]) -> dict[str, Any]:
        """Tell a job's status and log as they come, and return its last description once it has ended.

        Args:
            wait: lets time pass between two looks.
        """
        told, missed, log = "", 0, _Log(self._logs, name)
        while True:
            try:
                found, missed = self.describe(name), 0
            except StoreRefusedError as error:
                missed += 1
                if missed >= _MISSED_MAX:
                    raise
                say(f"keepstep submit | {error}")
                wait()
                continue
            status = f"{found['TrainingJobStatus']}: {found.get('SecondaryStatus', '')}"
            for line in log.news():
                say(line)
            if status != told:
                say(f"keepstep submit | {status}")
                told = status
            if found["TrainingJobStatus"] in ENDED:
                return found
            wait()


class _Log:
    """What the hosts of a job print: a stream of events for each of them."""

    def __init__(self, client: Any, job: str) -> None:
        self._client, self._job = client, job
        self._tokens: dict[str, str] = {}

    def news(self) -> Iterator[str]:
        """All lines since the last call, host by host; none where there is no log yet."""
        try:
            found = self._client.describe_log_streams(logGroupName=LOG_GROUP, logStreamNamePrefix=f"{self._job}/")
            for stream in sorted(each["logStreamName"] for each in found["logStreams"]):
                host = stream.removeprefix(f"{self._job}/").rpartition("-")[0]
                yield from (f"[{host}] {line}" for line in self._of(stream))
        except ClientError as error:
            if error.response.get("Error", {}).get("Code") != "ResourceNotFoundException":
                yield f"keepstep submit | the log can not be read: {error}"
        except BotoCoreError as error:
            yield f"keepstep submit | the log can not be read now: {error}"

    def _of(self, stream: str) -> Iterator[str]:
        while True:
            where = {"logGroupName": LOG_GROUP, "logStreamName": stream, "startFromHead": True}
            token = self._tokens.get(stream)
            answer = self._client.get_log_events(**where, **({"nextToken": token} if token else {}))
            yield from (str(event["message"]) for event in answer["events"])
            self._tokens[stream] = answer["nextForwardToken"]
            if answer["nextForwardToken"] == token or not answer["events"]:
                return


def _ask(question: Callable[[], dict[str, Any]], what: str) -> dict[str, Any]:
    try:
        return question()
    except ClientError as error:
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") or 0)
        if 400 <= status < 500:
            raise ConfigError(f"{what}: {error}", "what AWS takes") from None
        raise StoreRefusedError(f"{what}: {error}", _AGAIN) from None
    except BotoCoreError as error:
        raise StoreRefusedError(f"{what}: {error}", _AGAIN) from None
