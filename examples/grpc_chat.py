"""Streams an answer over gRPC (service headrace.v1.Text). Usage: grpc_chat.py [HOST:PORT] [QUESTION]"""

import sys

import grpc

from headrace.protos import text_pb2, text_pb2_grpc

address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8001"
question = sys.argv[2] if len(sys.argv) > 2 else "What is the capital of France?"

request = text_pb2.ChatRequest(
    messages=[text_pb2.ChatMessage(role="user", content=question)],
    params=text_pb2.TextParams(temperature=0, max_tokens=64),
)
with grpc.insecure_channel(address) as channel:
    for response in text_pb2_grpc.TextStub(channel).Chat(request):
        print(response.content, end="", flush=True)
print()
