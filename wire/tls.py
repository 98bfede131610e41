"""Certificates from files, read again when the files change: rotation without a restart.

Between the parts of a cluster both sides show a certificate that the cluster's CA has signed, and that carries the name
`PART_NAME`: addresses of workers come and go, so they are not what is certified. A file that is half written, or a key
that does not fit its certificate, leaves the last good ones in force.
"""

from __future__ import annotations

import logging
import ssl
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

import grpc

from kvstore.errors import InvalidInput
from kvstore.files import FileReader
from wire.watched import WatchedFiles

log = logging.getLogger("genlock.tls")

PART_NAME = "genlock.internal"
REASON = "bad_tls_files"


@dataclass(frozen=True)
class TlsFiles:
    """Paths of PEM files. `ca` signs the peers' certificates; empty: no peer has to show one."""

    cert: str
    key: str
    ca: str = ""


@dataclass(frozen=True)
class Material:
    """What the files held. `generation` moves with every change."""

    cert: bytes
    key: bytes
    ca: bytes
    generation: int


class TlsSource:
    """The files' last good content. Safe from any thread."""

    def __init__(self, files: TlsFiles, section: str = "tls") -> None:
        """Raises InvalidInput (`bad_tls_files`) naming the setting, for files that cannot be used."""
        self.files = files
        self.rejected = 0
        self._section = section
        self._lock = threading.Lock()
        self._watched = WatchedFiles(files.cert, files.key, files.ca)
        self._material = self._read(1)

    def current(self) -> Material:
        """Looks at the files' times, and reads them where those moved."""
        with self._lock:
            if self._watched.changed():
                try:
                    self._material = self._read(self._material.generation + 1)
                    log.info("certificates of %s were read again", self.files.cert)
                except InvalidInput as error:
                    self.rejected += 1
                    log.warning("certificates were not read again: %s", error.message)
            return self._material

    def server_credentials(self, *, ask_peers: bool) -> grpc.ServerCredentials:
        """Follows the files. `ask_peers`: who connects must show a certificate of the CA."""
        told = self.current().generation

        def configuration(material: Material) -> grpc.ServerCertificateConfiguration:
            roots = material.ca if ask_peers else None
            return grpc.ssl_server_certificate_configuration([(material.key, material.cert)], roots)

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            nonlocal told
            material = self.current()
            if material.generation == told:
                return None
            told = material.generation
            return configuration(material)

        # None, for "as before", is missing in the stubs.
        return grpc.dynamic_ssl_server_credentials(configuration(self.current()), fetch, ask_peers)  # type: ignore[arg-type]

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """As the files are now; a channel keeps them."""
        material = self.current()
        return grpc.ssl_channel_credentials(material.ca or None, material.key, material.cert)

    def ssl_context(self) -> ssl.SSLContext:
        """For an HTTP server; `refresh` takes newer files in for new connections."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self.files.cert, self.files.key)
        return context

    def refresh(self, context: ssl.SSLContext, generation: int) -> int:
        """Loads newer files into the context. Returns their generation."""
        material = self.current()
        if material.generation != generation:
            context.load_cert_chain(self.files.cert, self.files.key)
        return material.generation

    def _read(self, generation: int) -> Material:
        files, name = self.files, self._section
        cert, key = _pem(files.cert, f"{name}.cert_file"), _pem(files.key, f"{name}.key_file")
        ca = _pem(files.ca, f"{name}.ca_file") if files.ca else b""
        _check_pair(cert, key, f"{name}.cert_file")
        if ca:
            try:
                ssl.create_default_context(cadata=ca.decode("ascii"))
            except (ssl.SSLError, ValueError) as error:
                raise _bad(f"{name}.ca_file", f"{files.ca} is no list of certificates: {error}") from error
        return Material(cert, key, ca, generation)


def _bad(field: str, wrong: str) -> InvalidInput:
    return InvalidInput(REASON, f"{field}: {wrong}", field=field)


def _pem(path: str, field: str) -> bytes:
    data = FileReader(REASON, field).data(path)
    if not data.lstrip().startswith(b"-----BEGIN"):
        raise _bad(field, f"{path} is no PEM file")
    return data


def _check_pair(cert: bytes, key: bytes, field: str) -> None:
    """The bytes that were read, not the files as they may be by now."""
    with tempfile.TemporaryDirectory(prefix="genlock-tls-") as folder:
        cert_file, key_file = Path(folder, "cert"), Path(folder, "key")
        cert_file.write_bytes(cert)
        key_file.touch(0o600)
        key_file.write_bytes(key)
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert_file, key_file, password="")
        except (ssl.SSLError, OSError, ValueError) as error:
            raise _bad(field, f"certificate and key do not fit or cannot be read: {error}") from error
