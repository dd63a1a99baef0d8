"""A small client for the gateway's gRPC API: `from headrace.client import TextClient`."""

from headrace.client.text_client import Answer, Call, TextClient
from headrace.protos.status import Reason, StatusError

__all__ = ["Answer", "Call", "Reason", "StatusError", "TextClient"]
