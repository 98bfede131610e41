"""Which certificates a process uses where."""

from __future__ import annotations

from cluster.settings import TlsConfig
from kvstore.errors import InvalidInput
from wire.dial import Dialer
from wire.tls import TlsFiles, TlsSource


def dialer_of(tls: TlsConfig) -> Dialer:
    """How this process reaches the other parts of the cluster. Raises InvalidInput naming a setting."""
    if not (tls.cert_file or tls.key_file or tls.ca_file):
        return Dialer()
    for name in ("cert_file", "key_file", "ca_file"):
        if not getattr(tls, name):
            raise InvalidInput(
                "bad_tls_files",
                f"tls.{name} is missing: between the parts of a cluster cert_file, key_file and ca_file go together",
                field=f"tls.{name}",
            )
    return Dialer(TlsSource(TlsFiles(tls.cert_file, tls.key_file, tls.ca_file)))


def front_tls(tls: TlsConfig) -> TlsSource | None:
    """What the front doors show; None: they are plain. Raises InvalidInput naming a setting."""
    cert, key = tls.api_cert_file or tls.cert_file, tls.api_key_file or tls.key_file
    if not cert and not key:
        if tls.client_ca_file:
            raise InvalidInput(
                "bad_tls_files", "tls.client_ca_file needs a certificate of the door: set tls.cert_file and "
                "tls.key_file", field="tls.client_ca_file",
            )  # fmt: skip
        return None
    return TlsSource(TlsFiles(cert, key, tls.client_ca_file))
