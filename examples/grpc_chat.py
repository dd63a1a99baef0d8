"""Streams an answer over gRPC (service headrace.v1.Text). Usage: grpc_chat.py [HOST:PORT] [QUESTION]"""

import sys

from headrace.client import TextClient

address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8001"
question = sys.argv[2] if len(sys.argv) > 2 else "What is the capital of France?"

with TextClient(address) as client:
    answers = client.chat(question, temperature=0, max_tokens=64)
    for piece in answers:
        print(piece.content, end="", flush=True)
print()
