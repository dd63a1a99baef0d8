"""TLS of the endpoint picker: proxies of the Inference Extension speak it unless they are told not to.

fleet        the certificate of the fleet (`--tls-dir`), which proxies may check for the name headrace.internal
mutual       the same, and proxies must show a certificate of the fleet's authority
self-signed  a certificate that the process makes for itself: encrypted, for proxies that check no certificate
none         plain gRPC
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import StrEnum
from typing import TypeAlias

import grpc

from headrace.common.openssl import OpensslError, self_signed
from headrace.common.transport.channels import FLEET_NAME, PLAIN, Transport

Bind: TypeAlias = Callable[[grpc.aio.Server, str], int]
"""Lets a server listen at an address, and returns its port. Raises RuntimeError if that is not possible."""

# Longer than any process lives.
_DAYS = 3650


class PickerTls(StrEnum):
    """How proxies speak with the picker."""

    NONE = "none"
    SELF_SIGNED = "self-signed"
    FLEET = "fleet"
    MUTUAL = "mutual"


class PickerTlsError(ValueError):
    """The picker has no certificate. The message is a sentence with the remedy."""


def picker_bind(tls: PickerTls | None, transport: Transport) -> Bind:
    """How the picker listens; `tls` None is FLEET if the fleet has certificates, else NONE. Raises PickerTlsError."""
    if tls is None:
        tls = PickerTls.FLEET if transport.has_certificates else PickerTls.NONE
    match tls:
        case PickerTls.NONE:
            return PLAIN.bind
        case PickerTls.SELF_SIGNED:
            return _self_signed()
        case PickerTls.FLEET | PickerTls.MUTUAL:
            if not transport.has_certificates:
                raise PickerTlsError(
                    f"--endpoint-picker-tls {tls} needs the certificates of the fleet: give --tls-dir DIR, which "
                    f"headrace certs create makes, or use {PickerTls.SELF_SIGNED}"
                )
            return functools.partial(transport.bind, is_mutual=tls is PickerTls.MUTUAL)


def _self_signed() -> Bind:
    try:
        pair = self_signed([FLEET_NAME], _DAYS)
    except OpensslError as error:
        raise PickerTlsError(
            f"--endpoint-picker-tls {PickerTls.SELF_SIGNED}: no certificate can be made ({error}); install openssl, or "
            f"give --tls-dir DIR and {PickerTls.FLEET}"
        ) from None
    credentials = grpc.ssl_server_credentials([pair])
    return lambda server, address: server.add_secure_port(address, credentials)
