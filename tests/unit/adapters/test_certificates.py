"""Who is of the job, and who was."""

from __future__ import annotations

import stat

import pytest
from cryptography import x509

from keepstep.adapters.certificates import (
    AUTHORITY_DAYS,
    NODE_DAYS,
    BadAuthority,
    issue,
    make_authority,
    parse_authority,
    read_files,
    write_files,
)

NOW = 1_800_000_000.0
DAY = 86_400.0


def test_an_authority_comes_back_from_its_document_and_shows_its_key_nowhere():
    authority = make_authority("job", NOW)
    assert parse_authority(authority.document(), NOW) == authority
    assert "PRIVATE" not in repr(authority) and "key" not in repr(authority)


@pytest.mark.parametrize("document", ["", "[]", "{}", "no json", '{"certificate": "x", "key": "y"}'])
def test_what_is_no_authority_is_refused(document):
    with pytest.raises(BadAuthority, match="can not be read"):
        parse_authority(document, NOW)


def test_an_authority_that_ends_too_soon_or_has_another_ones_key_is_refused():
    authority, other = make_authority("job", NOW), make_authority("job", NOW)
    later = NOW + (AUTHORITY_DAYS - NODE_DAYS) * DAY
    parse_authority(authority.document(), later)
    with pytest.raises(BadAuthority, match="valid until"):
        parse_authority(authority.document(), later + DAY)
    mixed = type(authority)(authority.certificate, other.key)
    with pytest.raises(BadAuthority, match="another"):
        parse_authority(mixed.document(), NOW)


def test_a_nodes_certificate_names_it_and_outlives_the_longest_job():
    certificate = x509.load_pem_x509_certificate(issue(make_authority("j", NOW), ["algo-1", "10.0.0.1", "::1"], NOW)[0])
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["algo-1"]
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.1", "::1"]
    assert certificate.not_valid_after_utc.timestamp() > NOW + 28 * DAY


def test_files_are_for_this_user_alone_and_good_until_they_end(tmp_path):
    authority, other = make_authority("job", NOW), make_authority("job", NOW)
    folder = tmp_path / "scratch" / "tls"
    assert read_files(folder, NOW) is None
    files = write_files(folder, authority.certificate, *issue(authority, ["algo-1"], NOW))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in (files.ca, files.cert, files.key)} == {0o600}
    assert read_files(folder, NOW) == authority.fingerprint
    assert read_files(folder, NOW + NODE_DAYS * DAY) is None
    write_files(folder, authority.certificate, *issue(other, ["algo-1"], NOW))
    assert read_files(folder, NOW) is None
