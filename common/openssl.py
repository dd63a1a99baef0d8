"""Keys and certificates from the openssl command, which every server has. This avoids a library in all installations
for a rare task."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
"""The arguments of `openssl req` for a new key that is not encrypted."""
_TIMEOUT_S = 30.0


class OpensslError(RuntimeError):
    """The command failed. The message is a sentence with the reason."""


class NoOpensslError(OpensslError):
    """The openssl command is not installed."""


def openssl(arguments: Sequence[str]) -> None:
    """Run `openssl ARGUMENTS`. Raises OpensslError."""
    try:
        done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except FileNotFoundError:
        raise NoOpensslError("there is no openssl command") from None
    except subprocess.TimeoutExpired:
        raise OpensslError("openssl does not finish") from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise OpensslError(f"openssl {arguments[0]} failed: {reason[:300]}")


def self_signed(names: Sequence[str], days: int) -> tuple[bytes, bytes]:
    """A new key and a certificate for DNS names that it signs itself, as PEM. Raises OpensslError."""
    alternatives = ",".join(f"DNS:{name}" for name in names)
    with tempfile.TemporaryDirectory() as work:
        key, certificate = Path(work, "key.pem"), Path(work, "cert.pem")
        request = ["req", "-x509", *NEW_KEY, "-keyout", str(key), "-out", str(certificate), "-days", str(days)]
        openssl([*request, "-subj", "/CN=headrace", "-addext", f"subjectAltName={alternatives}"])
        return key.read_bytes(), certificate.read_bytes()
