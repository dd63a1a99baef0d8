"""Certificates for tests, made by the command that users have."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from headrace.cli.main import cli


def make_certificates(directory: Path, *, ca: Path | None = None, hosts: tuple[str, ...] = ()) -> Path:
    """Run `headrace certs create` with a new authority or another one's. A second call renews the certificates."""
    flags = [flag for host in hosts for flag in ("--host", host)]
    done = CliRunner().invoke(cli, ["certs", "create", str(directory), *flags, *(["--ca", str(ca)] if ca else [])])
    assert done.exit_code == 0, done.output
    return directory


def replace_certificates(directory: Path, source: Path) -> Path:
    """Give a directory the authority, the certificate and the key of another one."""
    for name in ("ca.pem", "cert.pem", "key.pem"):
        (directory / name).write_bytes((source / name).read_bytes())
    return directory
