"""Notices of an instance's end, heard from a metadata service that answers as EC2's does."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from keepstep.adapters.imds import open_metadata, survey_metadata
from tests.support.metadata_service import MetadataService, metadata_service
from tests.support.ports import free_port

QUIET = {"spot_at": None, "rebalance": False}


@pytest.fixture
def service() -> Iterator[MetadataService]:
    with metadata_service() as service:
        yield service


@pytest.fixture
def ask(service: MetadataService, monkeypatch: pytest.MonkeyPatch) -> Callable[[], dict[str, object]]:
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", service.endpoint)
    return open_metadata()


def test_each_notice_is_heard_when_it_is_there(service, ask):
    assert ask() == QUIET
    service.recommend()
    assert ask() == {"spot_at": None, "rebalance": True}
    service.take_away(1_800_000_000)
    assert ask() == {"spot_at": 1_800_000_000.0, "rebalance": True}


def test_one_token_does_for_many_questions_and_one_too_old_is_replaced(service, ask):
    for _ in range(3):
        assert ask() == QUIET
    assert service.tokens == {"token-1"}
    service.tokens.clear()
    assert ask() == QUIET
    assert service.tokens == {"token-2"}


def test_a_service_of_version_1_is_not_asked(service, ask):
    service.has_tokens = False
    service.take_away(1_800_000_000)
    assert list(ask()) == ["away"]


@pytest.mark.parametrize("text", ["", "no JSON", "[]", '{"action": "terminate"}', '{"time": "soon"}'])
def test_what_is_no_notice_is_none(service, ask, text):
    service.documents["spot/instance-action"] = text
    assert list(ask()) == ["away"]
    service.documents.clear()
    assert ask() == QUIET


def test_nobody_there_is_normal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://127.0.0.1:{free_port()}/")
    assert list(open_metadata()()) == ["away"]
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    assert list(open_metadata()()) == ["away"]


def test_a_survey_says_how_each_door_answers_and_nothing_of_what_is_behind(service, monkeypatch):
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", service.endpoint)
    assert survey_metadata() == {"token": 200, "listing": 401, "spot": 404, "rebalance": 404}
    service.take_away(1_800_000_000)
    assert survey_metadata() == {"token": 200, "listing": 401, "spot": 200, "rebalance": 404}
    service.has_tokens = False
    assert survey_metadata() == {"token": 404, "listing": 401, "spot": 401, "rebalance": 401}


def test_a_survey_where_nobody_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://127.0.0.1:{free_port()}/")
    found = survey_metadata()
    assert {"refused" in str(error) for error in found.values()} == {True}
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", "no address")
    assert list(survey_metadata()) == ["error"]
