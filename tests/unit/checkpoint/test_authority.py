"""All hosts of a job hold one authority, whoever was first."""

from __future__ import annotations

from keepstep.checkpoint.authority import put_authority, read_authority, remove_authority
from tests.support.stores import memory_store


def test_the_first_write_stands_and_only_the_one_found_is_replaced():
    store = memory_store()
    assert read_authority(store, "job") is None
    assert put_authority(store, "job", "one", None)
    assert not put_authority(store, "job", "two", None)
    document, etag = read_authority(store, "job")
    assert document == "one"
    assert put_authority(store, "job", "three", etag)
    assert not put_authority(store, "job", "four", etag)
    assert read_authority(store, "job")[0] == "three"


def test_only_the_one_meant_is_removed():
    store = memory_store()
    put_authority(store, "job", "one", None)
    etag = read_authority(store, "job")[1]
    assert not remove_authority(store, "job", "another")
    assert remove_authority(store, "job", etag)
    assert read_authority(store, "job") is None
    assert not remove_authority(store, "job", etag)
