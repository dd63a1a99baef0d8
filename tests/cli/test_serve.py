"""Decisions and refusals of `headrace serve` before it starts a process. tests/e2e runs it."""

from __future__ import annotations

import errno
import io
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from headrace.cli.fleet.run_state import RunState, ServeRecord
from headrace.cli.hosting.finding import check_memory, find_model
from headrace.cli.main import cli
from headrace.cli.models import pull
from headrace.cli.models.model_cache import model_directory
from headrace.cli.serving.log_sink import LogSink
from headrace.cli.serving.model_plans import Sizing
from headrace.cli.serving.placement import WorkerPlace
from headrace.cli.serving.plan import ModelPlan, ServeOptions
from headrace.cli.serving.ranks import Ranks
from headrace.cli.serving.running import Serving, first_requests
from headrace.cli.serving.serve import choose_grpc_port
from headrace.common.commands import CommandError
from headrace.common.ports import chosen_port, free_port
from tests.cli.conftest import write_files


@pytest.fixture
def busy_port() -> Iterator[int]:
    """A port that something listens on, with a free one above it."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_port("127.0.0.1")))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.fixture
def log() -> Iterator[LogSink]:
    sink = LogSink(io.BytesIO())
    yield sink
    sink.close(5)


def run(*args: str) -> Result:
    return CliRunner().invoke(cli, ["serve", *args])


def test_a_busy_port_is_refused_before_anything_else(cache: Path, busy_port: int) -> None:
    result = run("no-such-model", "--port", str(busy_port))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert f"error: port {busy_port} on 127.0.0.1 is already in use" in result.stderr
    assert "--port" in result.stderr


def test_a_busy_grpc_port_is_refused_only_if_it_was_asked_for(cache: Path, busy_port: int, log: LogSink) -> None:
    with pytest.raises(CommandError, match=f"port {busy_port} .* --grpc-port"):
        choose_grpc_port("127.0.0.1", 1, busy_port, log)
    assert choose_grpc_port("127.0.0.1", busy_port - 1, None, log) == 0
    assert choose_grpc_port("127.0.0.1", busy_port, None, log) == busy_port + 1
    assert choose_grpc_port("127.0.0.1", busy_port, 0, log) == 0


def test_one_port_for_http_and_grpc_is_refused(log: LogSink) -> None:
    with pytest.raises(CommandError, match="are both 8000"):
        choose_grpc_port("127.0.0.1", 8000, 8000, log)


def test_a_model_that_is_nowhere_is_refused_and_what_is_known_is_named(cache: Path, model_folder: Path) -> None:
    CliRunner().invoke(cli, ["pull", str(model_folder)])
    result = run("nosuch", "--port", "0")
    assert result.exit_code == 2
    assert "unknown model 'nosuch': it is not one of my-model, smollm2-135m" in result.stderr


@pytest.mark.parametrize(
    ("model", "hint"),
    [
        ("smolm2-135m", "did you mean smollm2-135m?"),
        ("Qwen3:8B", "did you mean qwen3-8b?"),
        ("./nosuch", "unknown model './nosuch': there is no such file or directory"),
        ("paper.pdf", "unknown model 'paper.pdf': it is a file, but not a .gguf file"),
        ("sha256-1", "it is a GGUF file whose name must end in .gguf"),
    ],
)
def test_a_wrong_guess_of_a_model_gets_a_hint(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, hint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "paper.pdf").write_bytes(b"%PDF-1.7")
    (tmp_path / "sha256-1").write_bytes(b"GGUF\x03")
    for command in ("serve", "pull"):
        result = CliRunner().invoke(cli, [command, model])
        assert result.exit_code == 2
        assert hint in result.stderr


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (("config.json", "model-00001-of-00002.safetensors"), "it has a checkpoint (model-00001-of-00002.safetensors)"),
        (("pytorch_model.bin",), "optimum-cli export openvino --model "),
        (("readme.md", "m-q4.gguf"), "it has GGUF files; name one of them, such as "),
        (("model_index.json",), "is not a complete model directory: missing openvino_model.xml"),
    ],
)
def test_a_directory_with_a_model_in_another_form_is_said_with_the_remedy(
    cache: Path, tmp_path: Path, files: tuple[str, ...], said: str
) -> None:
    folder = write_files(tmp_path / "other form", dict.fromkeys(files, b"{}"))
    result = run(str(folder))
    assert result.exit_code == 2
    assert said in result.stderr


@pytest.mark.parametrize(
    ("needs_key", "header"), [(False, ""), (True, ' -H "Authorization: Bearer $HEADRACE_API_KEY"')]
)
def test_what_is_proposed_first_sends_a_key_if_one_is_needed(tmp_path: Path, needs_key: bool, header: str) -> None:
    curl, chat = first_requests("http://127.0.0.1:8000", "m", tmp_path, needs_key=needs_key)
    body = '{"model":"m","messages":[{"role":"user","content":"Hello!"}]}'
    start = "curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json'"
    assert curl == f"{start}{header} -d '{body}'"
    assert chat == "headrace chat --url http://127.0.0.1:8000"


def test_a_host_that_is_not_of_this_machine_is_refused_with_any_port(cache: Path) -> None:
    with pytest.raises(CommandError, match="is not an address of this machine"):
        chosen_port("203.0.113.1", 0)


def test_a_directory_is_served_under_its_name(cache: Path, model_folder: Path) -> None:
    assert find_model(str(model_folder)) == (model_folder, "my-model")


def test_an_incomplete_directory_is_refused_and_each_missing_file_named(cache: Path, model_folder: Path) -> None:
    (model_folder / "openvino_tokenizer.xml").unlink()
    (model_folder / "openvino_model.bin").unlink()
    result = run(str(model_folder), "--port", "0")
    assert result.exit_code == 2
    assert "missing openvino_model.bin, openvino_tokenizer.xml" in result.stderr


def test_an_empty_file_is_named(cache: Path, model_folder: Path) -> None:
    (model_folder / "openvino_model.bin").write_bytes(b"")
    with pytest.raises(CommandError, match=r"openvino_model\.bin is empty"):
        find_model(str(model_folder))


def test_a_name_in_the_cache_is_served_from_there(cache: Path, model_folder: Path) -> None:
    CliRunner().invoke(cli, ["pull", str(model_folder), "--name", "owner/m"])
    assert find_model("owner/m") == (model_directory("owner/m"), "owner/m")


def test_a_damaged_model_in_the_cache_tells_how_to_mend_it(
    cache: Path, tmp_path: Path, model_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull, "_convert", lambda _name, _gguf, directory: write_files(directory, model_files))
    path = write_files(tmp_path, {"m.gguf": b"GGUF"}) / "m.gguf"
    assert find_model(str(path)) == (model_directory("m"), "m")
    (model_directory("m") / "openvino_model.bin").write_bytes(b"short")
    with pytest.raises(CommandError, match=r"5 bytes instead of 18: .* headrace pull --force .*m\.gguf repairs it"):
        find_model("m")


def test_more_threads_than_cpus_are_refused(cache: Path) -> None:
    result = run("--threads", "100000", "--port", "0")
    assert result.exit_code == 2
    assert "100000 threads cannot run on the" in result.stderr


@pytest.mark.parametrize("arguments", [("--port", "70000"), ("--workers", "0"), ("--kv-cache-gb", "0"), ("--nosuch",)])
def test_values_out_of_range_are_usage_errors(arguments: tuple[str, ...]) -> None:
    assert run(*arguments).exit_code == 2


def test_help_imports_nothing_slow() -> None:
    code = (
        "import sys\nfrom headrace.cli.main import cli\nimport headrace.cli.serving.serve\n"
        "slow = {'openvino', 'numpy', 'grpc', 'httpx', 'rich', 'msgspec'}\nprint(sorted(slow & set(sys.modules)))"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert finished.stdout == "[]\n"


def test_the_help_lists_every_command() -> None:
    shown = CliRunner().invoke(cli, ["--help"]).stdout
    for name in ("pull", "serve", "status", "chat", "worker", "router", "gateway"):
        assert f"\n  {name} " in shown
        if name not in ("worker", "router", "gateway"):
            assert CliRunner().invoke(cli, [name, "--help"]).exit_code == 0


def test_the_version_is_that_of_the_distribution() -> None:
    from importlib.metadata import version

    assert CliRunner().invoke(cli, ["--version"]).stdout == f"headrace {version('headrace')}\n"


def test_an_unknown_command_is_a_usage_error() -> None:
    assert CliRunner().invoke(cli, ["nosuch"]).exit_code == 2


def test_a_role_command_becomes_the_role() -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "headrace.cli", "router", "--help"], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0
    assert "--listen" in finished.stdout


def test_impossible_caches_are_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:       16777216 kB\nMemAvailable:    8388608 kB\n")
    kv, images = "--kv-cache-gb", "--image-cache-gb"
    check_memory({kv: 4.0, images: None}, 2, tmp_path)
    check_memory({kv: None, images: 0.0}, 64, tmp_path)
    with pytest.raises(CommandError, match=r"--kv-cache-gb asks for 2 times 4.5 GiB, but only 8.0 GiB"):
        check_memory({kv: 4.5, images: None}, 2, tmp_path)
    both = r"--kv-cache-gb and --image-cache-gb ask for 2 times 4.5 GiB, but only 8.0 GiB"
    with pytest.raises(CommandError, match=both):
        check_memory({kv: 4.0, images: 0.5}, 2, tmp_path)
    for flag in (kv, images):
        refused = CliRunner().invoke(cli, ["serve", flag, "1000000", "--port", "0"])
        assert refused.exit_code == 2
        assert refused.stderr.startswith(f"error: {flag} asks for 1e+06 GiB")


def test_a_disk_that_takes_no_record_stops_no_supervision(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_state: RunState, _record: ServeRecord) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    stream = io.BytesIO()
    log = LogSink(stream)
    options = ServeOptions(host="127.0.0.1", port=8000, grpc_port=0, socket_directory=Path("/nowhere"))
    plan = ModelPlan("m", Path("/models/m"), (WorkerPlace(0, (0,), 1),))
    serving = Serving(options, (plan,), Sizing(None), log, 0.0, Ranks())
    monkeypatch.setattr(RunState, "write", full)
    for _ in range(3):
        serving.supervisor.on_change()
    log.close(10.0)
    assert stream.getvalue().count(b"its record cannot be written ([Errno 28] No space left on device)") == 1
