"""When small decode steps get a graph of their own, and that the engine keeps counts for each graph."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.worker.config import ConfigurationError
from headrace.worker.engine.step_cost import StepCostModel
from headrace.worker.model.decode_graph import wants_decode_graph
from tests.worker.conftest import VOCAB_SIZE, make_engine
from tests.worker.fake_runner import expected_tokens

WEIGHTS = 1000


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    (tmp_path / "openvino_model.bin").write_bytes(bytes(WEIGHTS))
    return tmp_path


def machine(directory: Path, flags: str) -> Path:
    (directory / "proc").mkdir()
    (directory / "proc/cpuinfo").write_text(f"processor\t: 0\nmodel name\t: amx_tile\nflags\t\t: {flags}\n")
    return directory


def wants(model_dir: Path, root: Path, asked: bool | None = None, **different: object) -> bool:
    settings = {"kv_precision": "u8", "execution_mode": "performance", "available": 20 * WEIGHTS, **different}
    return wants_decode_graph(asked, model_dir, root=root, **settings)  # type: ignore[arg-type]


def test_by_default_it_is_made_on_cpus_with_tiles_where_the_weights_are_a_tenth_of_the_memory(
    model_dir: Path,
) -> None:
    with_amx = machine(model_dir, "fpu avx512f amx_bf16 amx_tile amx_int8")
    assert wants(model_dir, with_amx)
    assert wants(model_dir, with_amx, available=10 * WEIGHTS)
    assert not wants(model_dir, with_amx, available=10 * WEIGHTS - 10)
    assert not wants(model_dir, with_amx, execution_mode="accuracy")
    assert not wants(model_dir, with_amx, kv_precision="bf16")


def test_by_default_it_is_not_made_on_other_cpus(model_dir: Path) -> None:
    assert not wants(model_dir, machine(model_dir, "fpu avx512f avx512_vnni"))
    assert not wants(model_dir, model_dir / "nowhere")


def test_what_is_asked_for_is_done(model_dir: Path) -> None:
    assert wants(model_dir, model_dir, True, available=0)
    assert not wants(model_dir, machine(model_dir, "amx_tile"), False)


@pytest.mark.parametrize("different", [{"execution_mode": "accuracy"}, {"kv_precision": "bf16"}])
def test_what_does_not_go_together_is_refused(model_dir: Path, different: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match="--decode-graph on needs --execution-mode performance"):
        wants(model_dir, model_dir, True, **different)
    assert not wants(model_dir, model_dir, False, **different)


def test_each_graph_keeps_a_token_count_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three streams that end one by one, and then prompts between the steps of others: small steps are padded to small
    ones only, never to those that the other graph computed."""
    monkeypatch.setattr(StepCostModel, "token_ms", 0.25)
    monkeypatch.setattr(StepCostModel, "change_ms", 5.0)
    engine = make_engine()
    engine.runner.small_decode = 4
    requests = [engine.request(list(range(9, 15 + number)), max_tokens=3 + 4 * number) for number in range(7)]
    engine.run()
    for number, request in enumerate(requests):
        assert engine.tokens[request] == expected_tokens(list(range(9, 15 + number)), 3 + 4 * number, VOCAB_SIZE)
    small = [(size, padding) for size, padding in engine.runner.decode_sizes if size <= 4]
    large = [(size, padding) for size, padding in engine.runner.decode_sizes if size > 4]
    assert all(size + padding <= 4 for size, padding in small)
    assert any(padding for _, padding in small)
    assert any(padding for _, padding in large)
