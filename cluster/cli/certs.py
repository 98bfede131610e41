"""`genlock certs`: certificates for trying TLS out."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(
    epilog="""\b
Examples:
  genlock certs --out tls
  genlock certs --out tls --host gateway.example.com --host 10.0.0.7

\b
Then, for each process of the cluster:
  tls: {cert_file: tls/tls.crt, key_file: tls/tls.key, ca_file: tls/ca.crt}
and for clients: export GENLOCK_CA=tls/ca.crt. Run again before the 90 days are over: running processes take the new
files in by themselves. Where certificates come from a real CA, they need the DNS name genlock.internal besides their
hosts' names."""
)
@click.option("--out", "folder", required=True, type=click.Path(file_okay=False, path_type=Path), help="Folder.")
@click.option("--host", "hosts", multiple=True, help="Name or address that clients use; may repeat.")
def command(folder: Path, hosts: tuple[str, ...]) -> int:
    """Makes a development CA in a folder, once, and a certificate of it: for the front doors, and for the parts of a
    cluster towards each other."""
    import datetime

    from cluster.devca import make

    made = make(folder, hosts, datetime.datetime.now(datetime.UTC))
    for path in (made.ca, made.cert, made.key):
        click.echo(path)
    return 0
