"""What the instance's metadata service says of the instance's end. Version 2 of the service alone is asked.

Where it is not reached there is nothing to hear: most training containers can not reach it. botocore carries the
requests, and takes the endpoint from where all of AWS's tools do.

Source: "Spot Instance interruption notices" and "EC2 instance rebalance recommendations", Amazon EC2 User Guide.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit

from botocore.exceptions import BotoCoreError
from botocore.session import Session
from botocore.utils import IMDSFetcher

_ENDPOINT = "ec2_metadata_service_endpoint"
_MODE = "ec2_metadata_service_endpoint_mode"
_SPOT = "latest/meta-data/spot/instance-action"
_REBALANCE = "latest/meta-data/events/recommendations/rebalance"
_TIMEOUT_S = 1.0
_TOKEN_BYTES_MAX = 4096
_LISTING = "latest/meta-data/"
_OK, _ABSENT, _UNAUTHORIZED = 200, 404, 401


class MetadataAway(Exception):
    """The service does not answer, or is not the one of EC2."""


class InstanceMetadata(IMDSFetcher):  # type: ignore[misc]
    """Asks the service; botocore's own way of reaching it."""

    def __init__(self) -> None:
        session = Session()
        config = {name: session.get_config_variable(name) for name in (_ENDPOINT, _MODE)}
        super().__init__(timeout=_TIMEOUT_S, num_attempts=1, config=config)
        self._token: str | None = None

    def notices(self) -> dict[str, object]:
        """Ask once.

        Returns:
            `spot_at`, unix seconds at which the Spot instance is taken away (None while it is not), and `rebalance`,
            whether it is at an elevated risk of that; `away` and why, where there is nobody to ask.
        """
        try:
            spot, rebalance = self._document(_SPOT), self._document(_REBALANCE)
            return {"spot_at": None if spot is None else _unix(spot), "rebalance": rebalance is not None}
        except (MetadataAway, self._RETRIES_EXCEEDED_ERROR_CLS, BotoCoreError) as error:
            self._token = None
            return {"away": str(error) or type(error).__name__}

    def survey(self) -> dict[str, object]:
        """Ask for each thing by itself, and say how that ended, not what was answered.

        Returns:
            `token`, `listing` (without a token, by version 1 of the service), `spot`, `rebalance`: an HTTP status, or
            why there is none.
        """
        token, text = self._ask("PUT", self._TOKEN_PATH, {"x-aws-ec2-metadata-token-ttl-seconds": "60"})
        named = {"x-aws-ec2-metadata-token": text} if token == _OK else {}
        found: dict[str, object] = {"token": token, "listing": self._ask("GET", _LISTING, {})[0]}
        return found | {
            name: self._ask("GET", path, named)[0] for name, path in (("spot", _SPOT), ("rebalance", _REBALANCE))
        }

    def _ask(self, method: str, path: str, headers: Mapping[str, str]) -> tuple[int | str, str]:
        """A status or an error, which botocore's own way would swallow; and the text that came with it."""
        base = urlsplit(self.get_base_url())
        kind = http.client.HTTPSConnection if base.scheme == "https" else http.client.HTTPConnection
        connection = kind(base.hostname or "", base.port, timeout=_TIMEOUT_S)
        try:
            connection.request(method, f"{base.path.rstrip('/')}/{path}", headers=dict(headers))
            response = connection.getresponse()
            return response.status, response.read(_TOKEN_BYTES_MAX).decode("ascii", "replace").strip()
        except (OSError, ValueError, http.client.HTTPException) as error:
            return str(error) or type(error).__name__, ""
        finally:
            connection.close()

    def _document(self, path: str) -> dict[str, Any] | None:
        """A document of the service's; None where there is none now."""
        for _ in range(2):
            if self._token is None:
                self._token = self._fetch_metadata_token()
            if not self._token:
                break
            response = self._get_request(path, lambda answer: False, self._token)
            if response.status_code == _ABSENT:
                return None
            if response.status_code == _OK:
                return _parsed(response.text)
            self._token = None
            if response.status_code != _UNAUTHORIZED:  # that one means that the token is too old
                break
        raise MetadataAway("no token, or an answer that is none of EC2's")


def open_metadata() -> Callable[[], dict[str, object]]:
    """What is called to hear whether there are notices; see `InstanceMetadata.notices`."""
    return InstanceMetadata().notices


def survey_metadata() -> dict[str, object]:
    """How each door of the service is answered; see `InstanceMetadata.survey`."""
    try:
        return InstanceMetadata().survey()
    except BotoCoreError as error:
        return {"error": str(error)}


def _parsed(text: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise MetadataAway(f"found {text[:80]!r}, wanted a JSON object")
    return document


def _unix(document: dict[str, Any]) -> float:
    try:
        return datetime.fromisoformat(str(document["time"])).timestamp()
    except (KeyError, ValueError) as error:
        raise MetadataAway(f"found {document}, wanted a time") from error
