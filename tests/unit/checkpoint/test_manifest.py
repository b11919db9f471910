from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint.digests import crc32c, format_digest
from keepstep.checkpoint.keys import (
    ManifestName,
    is_job,
    is_run,
    local_key,
    parse_manifest_key,
    parse_object_key,
    replicated_key,
)
from keepstep.checkpoint.manifest import (
    Head,
    StoredObject,
    build_manifest,
    claim_head,
    parse_head,
    parse_manifest,
    parse_stored_object,
)
from keepstep.checkpoint.strict_json import MalformedDocument, write_canonical

GOLDEN = Path(__file__).parent / "golden"
NAME = ManifestName(3, 120, "9f8e7d6c")
FIRST, SECOND = b"the first share", b"the second one"


def objects() -> list[StoredObject]:
    shares = [(FIRST, 0), (SECOND, len(FIRST))]
    return [
        *(
            StoredObject(replicated_key("digits", NAME, rank, 2), "replicated", rank, at, len(data), crc(data))
            for rank, (data, at) in enumerate(shares)
        ),
        *(
            StoredObject(local_key("digits", NAME, rank), "local", rank, 0, 100 + rank, crc(b"%d" % rank))
            for rank in range(2)
        ),
    ]


def crc(data: bytes) -> str:
    return f"{crc32c(data):08x}"


def manifest():
    return build_manifest("digits", NAME, 2, format_digest(crc32c(FIRST + SECOND)), objects()[::-1], 1_700_000_000)


def head() -> Head:
    return Head(4, 120, NAME.key("digits"), manifest().digest, "0a1b2c3d", "5f5e5d5c")


def test_the_manifest_of_version_1_stays_readable():
    golden = (GOLDEN / "manifest-v1.json").read_bytes()
    assert parse_manifest(golden) == manifest()
    assert manifest().to_bytes() == golden


def test_the_head_of_version_1_stays_readable():
    golden = (GOLDEN / "head-v1.json").read_bytes()
    assert parse_head(golden, "digits") == head()
    assert head().to_bytes() == golden


def test_a_claim_keeps_what_is_committed():
    claimed = claim_head(head(), 7, "another", "nonce")
    assert (claimed.step, claimed.manifest, claimed.digest) == (120, head().manifest, head().digest)
    assert (claimed.generation, claimed.run, claimed.nonce) == (7, "another", "nonce")
    fresh = claim_head(None, 7, "another", "nonce")
    assert parse_head(fresh.to_bytes(), "digits") == fresh == Head(7, 0, "", "", "another", "nonce")


def test_what_belongs_to_a_rank_is_found():
    made = manifest()
    assert [stored.rank for stored in made.replicated()] == [0, 1]
    assert [made.local(rank).rank for rank in range(2)] == [0, 1]
    for rank in (-1, 2):
        with pytest.raises(IndexError, match="of a world of 2"):
            made.local(rank)


def edited(**changes: object) -> bytes:
    """The golden manifest with other values, and a SHA-256 that fits them."""
    import hashlib

    document = {**json.loads((GOLDEN / "manifest-v1.json").read_bytes()), **changes}
    document = {name: value for name, value in document.items() if value is not ... and name != "sha256"}
    return write_canonical({**document, "sha256": hashlib.sha256(write_canonical(document)).hexdigest()})


def entry(place: int, **changes: object) -> list[object]:
    entries = json.loads((GOLDEN / "manifest-v1.json").read_bytes())["objects"]
    entries[place] = {name: value for name, value in {**entries[place], **changes}.items() if value is not ...}
    return entries


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"version": 2}, "version 1 is wanted, not 2"),
        ({"version": "1"}, "version 1 is wanted"),
        ({"version": True}, "version 1 is wanted"),
        ({"version": ...}, "version 1 is wanted, not None"),
        ({"job": ...}, r"missing \['job'\]"),
        ({"more": 1}, r"unknown \['more'\]"),
        ({"job": "../other"}, "malformed"),
        ({"job": "other"}, "no object of this checkpoint"),
        ({"run": "a.b"}, "malformed"),
        ({"digest": "md5:00"}, "malformed"),
        ({"generation": -1}, "negative"),
        ({"generation": 4}, "no object of this checkpoint"),
        ({"step": 0}, "can not be"),
        ({"step": 120.0}, "step must be int"),
        ({"step": True}, "step must be int"),
        ({"step": "120"}, "step must be int"),
        ({"world_size": 0}, "0 ranks"),
        ({"world_size": 3}, "3 ranks"),
        ({"world_size": 1}, "1 ranks"),
        ({"replicated_bytes": 28}, "29 bytes of 28"),
        ({"objects": []}, "0 objects"),
        ({"objects": {}}, "objects must be list"),
        ({"objects": [1, 2, 3, 4]}, "an object is wanted"),
        ({"created_unix": 1.5}, "created_unix must be int"),
        ({"created_unix": None}, "created_unix must be int"),
        ({"objects": entry(0, key="digits/objects/g3/s120/../../x")}, "no object of this checkpoint"),
        ({"objects": entry(0, key="digits/HEAD.json")}, "no object of this checkpoint"),
        ({"objects": entry(0, kind="other")}, "belongs"),
        ({"objects": entry(0, rank=1)}, "belongs"),
        ({"objects": entry(1, offset=14)}, "hole or an overlap"),
        ({"objects": entry(1, offset=16)}, "hole or an overlap"),
        ({"objects": entry(3, offset=1)}, "hole or an overlap"),
        ({"objects": entry(1, size_bytes=-1)}, "negative"),
        ({"objects": entry(1, size_bytes=13)}, "28 bytes of 29"),
        ({"objects": entry(1, crc32c="0X0")}, "malformed"),
        ({"objects": entry(1, crc32c=12)}, "crc32c must be str"),
        ({"objects": entry(1, crc32c=...)}, "missing"),
    ],
)
def test_a_manifest_that_deviates_is_refused(changes, why):
    with pytest.raises(MalformedDocument, match=why):
        parse_manifest(edited(**changes))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"\xff",
        b"{",
        b'{"version":1}',
        b'{"version":1,"version":1}',
        b"[" * 100_000,
        b'{"version":NaN}',
    ],
)
def test_what_is_no_manifest_is_refused(data):
    with pytest.raises(MalformedDocument):
        parse_manifest(data)
    with pytest.raises(MalformedDocument):
        parse_head(data, "digits")


def test_every_flipped_bit_and_every_cut_is_found():
    golden = (GOLDEN / "manifest-v1.json").read_bytes()
    for place in range(len(golden)):
        with pytest.raises(MalformedDocument):
            parse_manifest(golden[:place])
        for bit in range(0, 8, 3):
            flipped = bytearray(golden)
            flipped[place] ^= 1 << bit
            with pytest.raises(MalformedDocument):
                parse_manifest(bytes(flipped))


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 2},
        {"step": 121},
        {"step": 0},
        {"digest": ""},
        {"digest": "x"},
        {"manifest": ""},
        {"manifest": "other/manifests/3-120-9f8e7d6c.json"},
        {"generation": 2},
        {"run": ""},
        {"nonce": "../x"},
        {"more": 1},
        {"nonce": None},
    ],
)
def test_a_head_that_deviates_is_refused(changes):
    document = {**json.loads(head().to_bytes()), **changes}
    with pytest.raises(MalformedDocument):
        parse_head(write_canonical(document), "digits")


def test_shares_that_do_not_make_up_the_digest_are_refused():
    with pytest.raises(MalformedDocument, match="agreed on crc32c:00000000"):
        build_manifest("digits", NAME, 2, "crc32c:00000000", objects(), 1)


@pytest.mark.parametrize("missing", range(4))
def test_a_manifest_with_a_share_missing_is_refused(missing):
    some = [stored for place, stored in enumerate(objects()) if place != missing]
    with pytest.raises(MalformedDocument, match="3 objects for 2 ranks"):
        build_manifest("digits", NAME, 2, manifest().digest, some, 1)


def test_a_report_is_read_strictly():
    with pytest.raises(MalformedDocument, match="report: missing"):
        parse_stored_object({"key": "a"}, "report")


numbers = st.integers(0, 10**15)
runs = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,20}", fullmatch=True)


@given(numbers, numbers, runs)
def test_keys_say_what_they_were_made_of(generation, step, run):
    name = ManifestName(generation, step, run)
    assert is_run(run)
    assert parse_manifest_key("a.job-1", name.key("a.job-1")) == name
    assert parse_object_key("a.job-1", local_key("a.job-1", name, 7)) == (generation, step)
    assert parse_object_key("a.job-1", replicated_key("a.job-1", name, 7, 8)) == (generation, step)
    assert parse_manifest_key("job", name.key("a.job-1")) is None
    assert parse_object_key("job", local_key("a.job-1", name, 7)) is None


@pytest.mark.parametrize(
    "key",
    [
        "",
        "job/HEAD.json",
        "job/manifests/",
        "job/manifests/1-2.json",
        "job/manifests/01-2-r.json",
        "job/manifests/1-2-r.json\n",
        "job/manifests/1-2-r.jsonx",
        "job/manifests/1-2-.json",
        "job/manifests/1-2-a/b.json",
        "job/manifests/-1-2-r.json",
    ],
)
def test_other_keys_are_no_manifests(key):
    assert parse_manifest_key("job", key) is None


def test_names_of_jobs():
    assert is_job("digits-2024.01_a")
    for other in ("", ".", "..", "a/b", "-a", "a b", "a" * 129, "ä"):
        assert not is_job(other)
