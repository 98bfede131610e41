"""A certificate authority for trying things out: one CA, one certificate for all parts of a cluster on named hosts."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvstore.errors import InvalidInput
from wire.tls import PART_NAME

CA_DAYS = 365
CERT_DAYS = 90
LOCAL = ("localhost", "127.0.0.1")


@dataclass(frozen=True)
class DevCertificates:
    """Paths of the files: `ca.crt`, `ca.key`, `tls.crt`, `tls.key`."""

    ca: Path
    cert: Path
    key: Path


def make(folder: Path, hosts: Sequence[str], now: datetime.datetime) -> DevCertificates:
    """Makes a CA in `folder` where there is none, and a new certificate of it for `hosts` and for the parts of a
    cluster. Keys are readable by their owner alone. Raises InvalidInput."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        ca_cert, ca_key = _authority(folder, now)
        _certificate(folder, ca_cert, ca_key, hosts, now)
    except (OSError, ValueError) as error:
        raise InvalidInput("bad_tls_folder", f"{folder}: {error}", field="tls_folder") from error
    return DevCertificates(folder / "ca.crt", folder / "tls.crt", folder / "tls.key")


def _authority(folder: Path, now: datetime.datetime) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    cert_path, key_path = folder / "ca.crt", folder / "ca.key"
    if cert_path.exists() and key_path.exists():
        cert = x509.load_pem_x509_certificate(cert_path.read_bytes())
        key = serialization.load_pem_private_key(key_path.read_bytes(), None)
        if isinstance(key, ec.EllipticCurvePrivateKey) and cert.not_valid_after_utc > now:
            return cert, key
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Genlock development CA")])
    cert = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=CA_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(_usage(sign=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    _write(key_path, _private(key), 0o600)
    _write(cert_path, cert.public_bytes(serialization.Encoding.PEM), 0o644)
    return cert, key


def _certificate(
    folder: Path, ca: x509.Certificate, ca_key: ec.EllipticCurvePrivateKey, hosts: Sequence[str], now: datetime.datetime
) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    names: list[x509.GeneralName] = [x509.DNSName(PART_NAME)]
    for host in dict.fromkeys([*LOCAL, *hosts]):
        address: ipaddress.IPv4Address | ipaddress.IPv6Address | None = None
        with contextlib.suppress(ValueError):
            address = ipaddress.ip_address(host)
        names.append(x509.DNSName(host) if address is None else x509.IPAddress(address))
    cert = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "genlock")]))
        .issuer_name(ca.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=CERT_DAYS))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .add_extension(_usage(sign=False), critical=True)
        .sign(ca_key, hashes.SHA256())
    )
    # The key first: a reader in between finds a pair that does not fit, and keeps its old one.
    _write(folder / "tls.key", _private(key), 0o600)
    _write(folder / "tls.crt", cert.public_bytes(serialization.Encoding.PEM), 0o644)


def _usage(*, sign: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=sign, crl_sign=sign, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, data: bytes, mode: int) -> None:
    """Whole or not at all, and never readable by others in between."""
    fresh = path.with_suffix(path.suffix + ".new")
    fresh.unlink(missing_ok=True)
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)
    fresh.rename(path)
