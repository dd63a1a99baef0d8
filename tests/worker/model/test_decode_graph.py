"""When small decode steps get their own graph, and the token counts that the engine keeps for each graph."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from headrace.worker.config import ConfigurationError
from headrace.worker.engine.scheduler import SchedulerOutput
from headrace.worker.engine.step_meter import StepSize
from headrace.worker.model.batch import Graph
from headrace.worker.model.decode_graph import wants_decode_graph
from headrace.worker.speculation.load import speculation_for
from tests.worker.configs import worker_config
from tests.worker.conftest import make_engine

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


def test_drafts_are_verified_by_default_where_answers_do_not_depend_on_when(model_dir: Path) -> None:
    default = worker_config(model_dir)
    assert speculation_for(default, with_amx=False) == "auto"
    assert speculation_for(default, with_amx=True) == "off"
    assert speculation_for(replace(default, execution_mode="accuracy"), with_amx=True) == "auto"
    assert speculation_for(replace(default, speculation="ngram"), with_amx=True) == "ngram"


@pytest.mark.parametrize("different", [{"execution_mode": "accuracy"}, {"kv_precision": "bf16"}])
def test_what_does_not_go_together_is_refused(model_dir: Path, different: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match="--decode-graph on needs --execution-mode performance"):
        wants(model_dir, model_dir, True, **different)
    assert not wants(model_dir, model_dir, False, **different)


def test_each_graph_has_a_size_of_its_own() -> None:
    """A step after one on the other graph changes size only if the last step on its own graph had another size."""
    engine = make_engine(num_blocks=64)
    engine.runner.small_decode = 4
    sizes = []
    size = engine.engine.meter.size

    def watch(output: SchedulerOutput, graph: Graph, *, least: int) -> StepSize:
        sizes.append(size(output, graph, least=least))
        return sizes[-1]

    engine.engine.meter.size = watch  # type: ignore[method-assign]
    for number in range(3):
        engine.request(list(range(9, 15 + number)), max_tokens=30)
    while len(engine.scheduler.running) < 3 or sizes[-1].shape.prompt_tokens:
        engine.step()
    engine.step()
    engine.request(list(range(20)), max_tokens=1)
    del sizes[:]
    engine.step()
    engine.step()
    engine.scheduler.running[0].adapter_slot = 0
    engine.step()
    engine.scheduler.running[0].adapter_slot = -1
    engine.step()
    assert [(step.graph, step.shape.changed) for step in sizes] == [
        (Graph.MAIN, True),
        (Graph.SMALL_DECODE, False),
        (Graph.ADAPTERS, True),
        (Graph.SMALL_DECODE, False),
    ]
    engine.run()
