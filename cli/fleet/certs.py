"""`headrace certs`: creates an authority, certificates and secrets for a fleet, to try out mutual TLS or to run a small
fleet.

If you already have an authority, let it sign instead.
"""

from __future__ import annotations

import ipaddress
import secrets
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

from headrace.common.commands import CommandError, CommandFailed
from headrace.common.openssl import NEW_KEY, NoOpensslError, OpensslError, openssl
from headrace.common.stores.files import replace_file

_CA_DAYS = 3650


@click.group()
def certs() -> None:
    """Certificates for mutual TLS between the processes of a fleet."""


@certs.command()
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.option("--host", "hosts", multiple=True, help="Further name or IP address of the certificate; may be repeated.")
@click.option(
    "--ca",
    "ca_directory",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Directory with the ca.pem and ca-key.pem to sign with.  [default: DIRECTORY; made if missing]",
)
@click.option(
    "--days",
    type=click.IntRange(1, 3650),
    default=365,
    show_default=True,
    help="Days for which the certificate is valid.",
)
def create(directory: Path, hosts: tuple[str, ...], ca_directory: Path | None, days: int) -> None:
    """Make the certificate of a host in DIRECTORY.

    DIRECTORY, which is for --tls-dir, gets ca.pem, cert.pem and key.pem, and the secrets of `certs secrets`. Run the
    command again to renew certificate and key; running processes use them within seconds. A ca.pem that has the
    authority beside others stays, so that an authority can be replaced. ca-key.pem is only needed to sign: keep it off
    the hosts that serve.
    """
    from headrace.common.transport.channels import FLEET_NAME, TransportError, read_identity

    names = [f"DNS:{FLEET_NAME}", "DNS:localhost", "IP:127.0.0.1", "IP:::1", *map(_alternative, hosts)]
    authority = ca_directory or directory
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (authority / "ca.pem").exists() and ca_directory is None:
            _make_authority(directory)
        _sign(directory, authority, names, days)
        _make_secrets(directory, authority, 0o600)
        read_identity(directory)
    except TransportError as error:
        raise CommandFailed(str(error)) from None
    except OSError as error:
        raise CommandError(f"{error.filename or directory}: {error.strerror}") from None
    click.echo(
        f"{directory} has ca.pem, cert.pem, key.pem, join-token and redis-password; give them to a process with",
        err=True,
    )
    click.echo(f"--tls-dir {directory} --join-token-file {directory / 'join-token'}")


@certs.command(name="secrets")
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--readable", is_flag=True, help="Make the files readable for every user, such as Redis in its own container."
)
def make_secrets(directory: Path, readable: bool) -> None:
    """Make the secrets of a fleet in DIRECTORY.

    The command makes those that DIRECTORY lacks, and no certificates.

    join-token is for --join-token-file; redis-password for HEADRACE_REDIS_PASSWORD_FILE; redis.conf has the same
    password for redis-server.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _make_secrets(directory, directory, 0o644 if readable else 0o600)
    except OSError as error:
        raise CommandError(f"{error.filename or directory}: {error.strerror}") from None
    click.echo(f"{directory} has join-token, redis-password and redis.conf", err=True)


def _make_secrets(directory: Path, authority: Path, mode: int) -> None:
    """Create missing secrets. A secret in the directory of the authority is copied from there."""
    for name in ("join-token", "redis-password"):
        path = directory / name
        shared = authority / name
        if not path.exists():
            secret = shared.read_bytes() if shared.exists() else f"{secrets.token_hex(32)}\n".encode()
            replace_file(path, secret, mode)
    password = (directory / "redis-password").read_text(encoding="ascii").strip()
    replace_file(directory / "redis.conf", f"requirepass {password}\n".encode(), mode)


def _alternative(host: str) -> str:
    try:
        return f"IP:{ipaddress.ip_address(host)}"
    except ValueError:
        if not host.isascii() or not all(character.isalnum() or character in "-._*" for character in host):
            raise CommandError(f"--host {host[:100]!r} is neither a name nor an IP address") from None
        return f"DNS:{host}"


def _make_authority(directory: Path) -> None:
    with tempfile.TemporaryDirectory(dir=directory) as work:
        extensions = ("basicConstraints=critical,CA:TRUE,pathlen:0", "keyUsage=critical,keyCertSign,cRLSign")
        request = ["req", "-x509", *NEW_KEY, "-keyout", f"{work}/key", "-out", f"{work}/cert", "-days", str(_CA_DAYS)]
        named = [*request, "-subj", "/CN=headrace fleet authority"]
        _openssl([*named, *(word for extension in extensions for word in ("-addext", extension))])
        replace_file(directory / "ca-key.pem", Path(work, "key").read_bytes(), 0o600)
        replace_file(directory / "ca.pem", Path(work, "cert").read_bytes(), 0o644)


def _sign(directory: Path, authority: Path, names: Sequence[str], days: int) -> None:
    missing = [name for name in ("ca.pem", "ca-key.pem") if not (authority / name).exists()]
    if missing:
        raise CommandError(f"{authority} has no {missing[0]} to sign with; name the directory that has, with --ca")
    with tempfile.TemporaryDirectory(dir=directory) as work:
        Path(work, "extensions").write_text(
            "basicConstraints=critical,CA:FALSE\nkeyUsage=critical,digitalSignature\n"
            f"extendedKeyUsage=serverAuth,clientAuth\nsubjectAltName={','.join(names)}\n"
        )
        request = ["req", "-new", *NEW_KEY, "-keyout", f"{work}/key", "-out", f"{work}/request"]
        _openssl([*request, "-subj", "/CN=headrace"])
        signed = ["x509", "-req", "-in", f"{work}/request", "-out", f"{work}/cert", "-days", str(days)]
        signed += ["-CA", str(authority / "ca.pem"), "-CAkey", str(authority / "ca-key.pem")]
        _openssl([*signed, "-set_serial", f"0x{secrets.token_hex(16)}", "-extfile", f"{work}/extensions"])
        if not _trusts(directory, authority):
            replace_file(directory / "ca.pem", (authority / "ca.pem").read_bytes(), 0o644)
        replace_file(directory / "key.pem", Path(work, "key").read_bytes(), 0o600)
        replace_file(directory / "cert.pem", Path(work, "cert").read_bytes(), 0o644)


def _trusts(directory: Path, authority: Path) -> bool:
    """Whether the ca.pem of a directory has an authority, maybe beside the one that it replaces."""
    path = directory / "ca.pem"
    return path.exists() and (authority / "ca.pem").read_bytes().strip() in path.read_bytes()


def _openssl(arguments: Sequence[str]) -> None:
    try:
        openssl(arguments)
    except NoOpensslError as error:
        raise CommandError(f"{error}: install it, or have your own authority sign") from None
    except OpensslError as error:
        raise CommandFailed(str(error)) from None
