"""Why nobody answers at an endpoint: one look at it by hand, and what that says about TLS."""

from __future__ import annotations

import re
import socket
import ssl
from dataclasses import dataclass
from enum import Enum

CA_VARIABLE = "GENLOCK_CA"
LOOK_S = 2.0
MAX_DETAIL_CHARS = 200
# A name, an IPv4 address or an IPv6 address in brackets, and a port.
ENDPOINT = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[^\s:/\[\]]+):(?P<port>[0-9]{1,5})", re.ASCII)


class Kind(Enum):
    NOBODY = 0
    # Somebody listens and makes no TLS connection.
    PLAIN = 1
    # A TLS connection was made; by a certificate that is trusted, where one is to be.
    TLS = 2
    UNTRUSTED = 3


@dataclass(frozen=True)
class Seen:
    kind: Kind
    detail: str = ""


def parsed(endpoint: str) -> tuple[str, int] | None:
    """Host and port; None where it does not read HOST:PORT."""
    found = ENDPOINT.fullmatch(endpoint)
    if found is None or not 0 < int(found["port"]) < 65_536:
        return None
    return found["host"].strip("[]"), int(found["port"])


def look(endpoint: str, ca_file: str) -> Seen:
    """Connects once, for at most twice `LOOK_S`. Blocking. `ca_file` empty: any certificate will do."""
    place = parsed(endpoint)
    if place is None:
        return Seen(Kind.NOBODY)
    try:
        plain = socket.create_connection(place, timeout=LOOK_S)
    except OSError:
        return Seen(Kind.NOBODY)
    with plain:
        try:
            with _context(ca_file).wrap_socket(plain, server_hostname=place[0]):
                return Seen(Kind.TLS)
        except ssl.SSLCertVerificationError as error:
            return Seen(Kind.UNTRUSTED, error.verify_message[:MAX_DETAIL_CHARS])
        except OSError:  # ssl.SSLError is one
            return Seen(Kind.PLAIN)


def why_not(endpoint: str, ca_file: str, seen: Seen) -> str:
    """What to say of an endpoint where no call gets through. Pure."""
    if seen.kind is Kind.UNTRUSTED:
        return (
            f"the certificate at {endpoint} is not trusted ({seen.detail}): name the CA that signed it in "
            f"{CA_VARIABLE}, which is {ca_file}"
        )
    if seen.kind is Kind.TLS and not ca_file:
        return f"the server at {endpoint} speaks TLS: name the CA that signed its certificate in {CA_VARIABLE}"
    if seen.kind is Kind.PLAIN and ca_file:
        return f"the server at {endpoint} does not speak TLS: unset {CA_VARIABLE}, or name another with --endpoint"
    if seen.kind is Kind.NOBODY:
        return f"no cluster at {endpoint}: start one with `genlock up`, or name another with --endpoint"
    return (
        f"no cluster at {endpoint}: somebody listens there and does not answer as a gateway; name another with "
        "--endpoint"
    )


def _context(ca_file: str) -> ssl.SSLContext:
    if ca_file:
        context = ssl.create_default_context(cafile=ca_file)
    else:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context
