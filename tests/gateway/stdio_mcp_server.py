"""An MCP server for tests that speaks over its standard input and output, well and badly: [MODE].

Modes: `dies` ends at its start, `mute` answers nothing, `stubborn` ends neither with its input nor by SIGTERM.
"""

import json
import os
import signal
import sys
import time

TOOLS = ("add", "ask", "cancelled", "crash", "environment", "flood", "freeze", "hang", "noise", "pid", "write")
mode = sys.argv[1] if len(sys.argv) > 1 else ""
cancelled = []
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
ADD = {"type": "object", "properties": {"a": DIGIT, "b": DIGIT}, "required": ["a", "b"]}


def put(line):
    """Write a line."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def send(**message):
    """Send a message."""
    put(json.dumps({"jsonrpc": "2.0", **message}))


def called(name, arguments):
    """The text of a tool's answer; None for no answer."""
    if name == "add":
        return str(arguments["a"] + arguments["b"])
    if name == "ask":
        send(id="p", method="ping")
        send(id=7, method="sampling/createMessage", params={})
        send(method="notifications/message", params={"data": "x"})
        return json.dumps([json.loads(sys.stdin.readline()) for _ in range(2)])
    if name == "cancelled":
        return json.dumps(cancelled)
    if name == "crash":
        os._exit(3)
    if name == "environment":
        return json.dumps(dict(os.environ))
    if name == "flood":
        for _ in range(arguments["lines"]):
            put("no message")
    if name == "freeze":
        time.sleep(3600)
    if name == "hang":
        return None
    if name == "noise":
        for line in (
            "Listening on stdio",
            "",
            "[1, 2]",
            '{"half": ',
            "\x00\ufffd",
            '{"jsonrpc": "2.0", "id": 999, "result": {}}',
        ):
            put(line)
    if name == "write":
        return "x" * arguments["bytes"]
    return str(os.getpid())


def answer(message):
    """Answer a request."""
    method, params = message["method"], message.get("params", {})
    if method == "initialize":
        info = {"name": "tests", "version": "1"}
        result = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": info}
    elif method == "tools/list":
        result = {
            "tools": [{"name": name, "inputSchema": ADD if name == "add" else {"type": "object"}} for name in TOOLS]
        }
    elif method == "ping":
        result = {}
    elif method == "tools/call":
        text = called(params["name"], params["arguments"])
        if text is None:
            return
        result = {"content": [{"type": "text", "text": text}]}
    else:
        send(id=message["id"], error={"code": -32601, "message": "no such method"})
        return
    send(id=message["id"], result=result)


if mode == "dies":
    sys.exit("no key")
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("starting", file=sys.stderr)
while line := sys.stdin.readline():
    message = json.loads(line)
    if message["method"] == "notifications/cancelled":
        cancelled.append(message["params"]["requestId"])
    if "id" in message and mode != "mute":
        answer(message)
while mode == "stubborn":
    time.sleep(3600)
