"""The job's own certificate authority, and what a node proves itself with: made, read and written, never logged.

A node's certificate carries its names and addresses, since etcd holds the address that a peer comes from against them,
and serves both ends of a connection: etcd's JSON gateway is a client of its own member.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
import json
import os
from collections.abc import Sequence
from dataclasses import field
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from keepstep.core.values import frozen
from keepstep.ports import TlsFiles

NODE_DAYS = 60
"""Longer than any job of SageMaker's may take, which is 28 days."""
AUTHORITY_DAYS = 2 * NODE_DAYS
_CLOCKS_DIFFER = dt.timedelta(days=1)
_NAME_MAX = 64


class BadAuthority(Exception):
    """What was read is no authority that a whole job could rely on."""

    retryable = False
    hint = "it is replaced by a new one"


@frozen
class Authority:
    """Who may say which node is of this job. Its key is shown nowhere."""

    certificate: bytes
    key: bytes = field(repr=False)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the certificate."""
        return fingerprint_of(self.certificate)

    def document(self) -> str:
        """As it lies in the store."""
        return json.dumps({"version": 1, "certificate": self.certificate.decode(), "key": self.key.decode()})


def fingerprint_of(certificate: bytes) -> str:
    """SHA-256 of a PEM certificate, in hexadecimal."""
    return x509.load_pem_x509_certificate(certificate).fingerprint(hashes.SHA256()).hex()


def make_authority(job: str, now_unix: float) -> Authority:
    """A new authority for a job."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name(f"keepstep {job}")
    builder = _builder(name, name, key, now_unix, AUTHORITY_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs=True), critical=True)
    certificate = builder.sign(key, hashes.SHA256())
    return Authority(certificate.public_bytes(serialization.Encoding.PEM), _pem(key))


def parse_authority(document: str, now_unix: float) -> Authority:
    """Read what lies in the store.

    Raises:
        BadAuthority: it can not be read, or ends before a certificate that it would issue now.
    """
    try:
        raw = json.loads(document)
        authority = Authority(str(raw["certificate"]).encode(), str(raw["key"]).encode())
        certificate, key = _load(authority)
    except (ValueError, KeyError, TypeError) as error:
        raise BadAuthority(f"it can not be read ({type(error).__name__})") from None
    if certificate.public_key() != key.public_key():
        raise BadAuthority("its key is of another one")
    left = certificate.not_valid_after_utc - _at(now_unix)
    if left < dt.timedelta(days=NODE_DAYS) or certificate.not_valid_before_utc > _at(now_unix):
        raise BadAuthority(f"it is valid until {certificate.not_valid_after_utc:%Y-%m-%d}")
    return authority


def issue(authority: Authority, places: Sequence[str], now_unix: float, days: int = NODE_DAYS) -> tuple[bytes, bytes]:
    """Make a certificate and its key for a node.

    Args:
        places: names and addresses of the node.
        days: how long it is valid; negative: it is expired already.
    """
    issuer, issuer_key = _load(authority)
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(_name(places[0]), issuer.subject, key, now_unix, days)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs=False), critical=True)
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    builder = builder.add_extension(x509.ExtendedKeyUsage(both), critical=False)
    known = [_general(place) for place in dict.fromkeys(places)]
    builder = builder.add_extension(x509.SubjectAlternativeName(known), critical=False)
    issuer_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
    certificate = builder.add_extension(issuer_id, critical=False).sign(issuer_key, hashes.SHA256())
    return certificate.public_bytes(serialization.Encoding.PEM), _pem(key)


def tls_files(folder: Path) -> TlsFiles:
    """Where a node's files lie below its scratch folder."""
    return TlsFiles(folder / "ca.pem", folder / "node.pem", folder / "node.key")


def write_files(folder: Path, authority: bytes, certificate: bytes, key: bytes) -> TlsFiles:
    """Write a node's files so that only this user can read them.

    Raises:
        OSError: they can not be written.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    files = tls_files(folder)
    for path, content in ((files.ca, authority), (files.key, key), (files.cert, certificate)):
        new = path.with_name(path.name + ".new")
        new.unlink(missing_ok=True)
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
        new.replace(path)
    return files


def read_files(folder: Path, now_unix: float) -> str | None:
    """Fingerprint of the authority of the files that are there; None where a node could not prove itself with them."""
    files = tls_files(folder)
    try:
        authority = files.ca.read_bytes()
        issuer = x509.load_pem_x509_certificate(authority)
        certificate = x509.load_pem_x509_certificate(files.cert.read_bytes())
        key = serialization.load_pem_private_key(files.key.read_bytes(), None)
        certificate.verify_directly_issued_by(issuer)
    except (OSError, ValueError, TypeError, InvalidSignature):
        return None
    if certificate.public_key() != key.public_key() or certificate.not_valid_after_utc <= _at(now_unix):
        return None
    return fingerprint_of(authority)


def _load(authority: Authority) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = serialization.load_pem_private_key(authority.key, None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("a key of another kind")
    return x509.load_pem_x509_certificate(authority.certificate), key


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now_unix: float, days: int
) -> x509.CertificateBuilder:
    now = _at(now_unix)
    ends = now + dt.timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, ends) - _CLOCKS_DIFFER)
        .not_valid_after(ends)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=signs, crl_sign=signs, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _general(place: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(place))
    except ValueError:
        return x509.DNSName(place)


def _name(text: str) -> x509.Name:
    """No common name: etcd takes that for a user's, and its gateway complains of it at every request."""
    return x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, text[:_NAME_MAX])])


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _at(unix: float) -> dt.datetime:
    return dt.datetime.fromtimestamp(unix, dt.UTC)
