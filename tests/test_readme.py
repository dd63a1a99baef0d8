"""Every example in README.md and docs/ is run against a real system.

A block marked ```bash or ```python is run, unless the line before it is a comment `<!-- not run: REASON -->`. The port
8000 of an example becomes that of the system, 8001 its gRPC port. Commands run from the root of the repository.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.serving import Serve, serving
from tests.patience import patience

ROOT = Path(__file__).parent.parent
_FENCE = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_EXAMPLE_BOUND_S = 60


@dataclass(frozen=True)
class Block:
    language: str
    code: str
    reason_not_to_run: str | None


def blocks_of(markdown: str) -> list[Block]:
    """The bash and python blocks of a document, in order."""
    found = []
    for fence in _FENCE.finditer(markdown):
        lines = markdown[: fence.start()].rstrip("\n").rsplit("\n", 1)
        marked = re.fullmatch(r"<!-- not run: (.+) -->", lines[-1].strip())
        found.append(Block(fence[1], fence[2], marked[1] if marked else None))
    return found


def documents() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


EXAMPLES = [
    pytest.param(block, id=f"{path.relative_to(ROOT)}:{number}")
    for path in documents()
    for number, block in enumerate(blocks_of(path.read_text()), 1)
    if block.reason_not_to_run is None
]
PROGRAMS = [("curl_chat.sh", "url"), ("openai_chat.py", "url"), ("grpc_chat.py", "grpc")]


def test_blocks_are_found_with_their_marks() -> None:
    markdown = "# A\n\n```bash\none\n```\n\n<!-- not run: too big -->\n```python\ntwo\n```\n\n```text\nthree\n```\n"
    assert blocks_of(markdown) == [Block("bash", "one\n", None), Block("python", "two\n", "too big")]


@pytest.fixture(scope="module")
def system() -> Iterator[Serve]:
    with serving() as serve:
        yield serve


def run(system: Serve, *command: str) -> str:
    """Run an example to its end and return what it printed."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    finished = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=patience(_EXAMPLE_BOUND_S),
        check=False,
    )
    assert finished.returncode == 0, f"{finished.stdout}\n{finished.stderr}\n{system.tail()}"
    return finished.stdout


def grpc_address(system: Serve) -> str:
    address = system.process_of("gateway")["grpc_address"]
    assert isinstance(address, str), "the system has no gRPC edge"
    return address


@pytest.mark.e2e
@pytest.mark.parametrize("block", EXAMPLES)
def test_an_example_of_the_documents_runs(system: Serve, block: Block) -> None:
    grpc_port = grpc_address(system).rpartition(":")[2]
    code = block.code.replace(":8000", f":{system.port}").replace(":8001", f":{grpc_port}")
    command = ("bash", "-euo", "pipefail", "-c", code) if block.language == "bash" else (sys.executable, "-c", code)
    assert run(system, *command).strip()


@pytest.mark.e2e
@pytest.mark.parametrize(("program", "edge"), PROGRAMS)
def test_a_program_in_examples_says_paris(system: Serve, program: str, edge: str) -> None:
    target = system.base_url if edge == "url" else grpc_address(system)
    path = str(ROOT / "examples" / program)
    command = (path,) if program.endswith(".sh") else (sys.executable, path)
    assert "Paris" in run(system, *command, target)
