"""The models that a file or the arguments of `headrace serve` describe."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from headrace.cli.hosting.memory import budget_of, private_bytes, weights_in_worker
from headrace.cli.hosting.settings import (
    HostSettings,
    ModelOptions,
    ModelSettings,
    check_names,
    kv_shares,
    read_settings,
)
from headrace.cli.main import cli
from headrace.cli.models import requirements
from headrace.cli.models.requirements import PROCESS_BYTES
from headrace.cli.serving.model_plans import Sizing, aliases_of, places_of, plan_models
from headrace.cli.serving.plan import ModelPlan
from headrace.cli.serving.topology import Core, Node, Topology
from headrace.common.commands import CommandError
from headrace.common.host_memory import GIB, available_bytes
from tests.e2e.shapes import MODEL as SHAPES

CORES = tuple(Core((number, number + 8), 0, 0, 0) for number in range(8))
MACHINE = Topology(CORES, (Node(0, 1 << 34, {0: 10}),), None)

FILE = """
[[models]]
model = "smollm2-135m"
name = "chat"
aliases = ["gpt-4o", "default"]
workers = 2
cores = 4
kv_share = 0.5

[[models]]
model = "/models/other"
kv_cache_gb = 1.5
max_context_tokens = 4096
adapters = ["sql=/adapters/sql"]
max_adapters = 2
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "models.toml"
    path.write_text(text)
    return path


def test_a_file_describes_models(tmp_path: Path) -> None:
    first, second = read_settings(write(tmp_path, FILE)).models
    assert first == ModelSettings(
        "smollm2-135m", name="chat", aliases=("gpt-4o", "default"), workers=2, cores=4, kv_share=0.5
    )
    assert second == ModelSettings(
        "/models/other", kv_cache_gb=1.5, max_context_tokens=4096, adapters=("sql=/adapters/sql",), max_adapters=2
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "it must have a table [[models]] for each model"),
        ("models = 3", "it must have a table [[models]] for each model"),
        (
            "[[models]]\nmodel = 'a'\n[other]",
            "the file has an unknown field `other`; there are models, aliases",
        ),
        ("[[models]]\nname = 'a'", "models[0] has no `model`"),
        ("[[models]]\nmodel = 'a'\ncors = 2", "models[0] has an unknown field `cors`; there are model, name"),
        ("[[models]]\nmodel = 'a'\nworkers = 0", "models[0].workers must be a whole number from 1"),
        ("[[models]]\nmodel = 'a'\nworkers = true", "models[0].workers must be a whole number from 1"),
        ("[[models]]\nmodel = 'a'\naliases = 'b'", "models[0].aliases must be a list of texts"),
        ("[[models]]\nmodel = ''", "models[0].model must be a text"),
        ("[[models]]\nmodel = 'a'\nkv_cache_gb = -1", "models[0].kv_cache_gb must be a number above 0"),
        ("[[models]]\nmodel = 'a'\nkv_share = 1.5", "models[0].kv_share must be at most 1"),
        ("[[models]]\nmodel = 'a'\nkv_share = nan", "models[0].kv_share must be a number above 0"),
        ("memory_gb = inf\n[[models]]\nmodel = 'a'", "memory_gb must be a number above 0"),
        ("[[models]]\nmodel='a'\n[[aliases]]\nname='x'\nmodels={a=nan}", "aliases[0].models.a must be a number above"),
        ("[[models]]\nmodel = 'a'\nkv_share = 0.1\nkv_cache_gb = 1", "of a exclude each other"),
        ("[[models]]\nmodel='a'\nkv_share=0.6\n[[models]]\nmodel='b'\nkv_share=0.6", "`kv_share` add up to 1.2"),
        ("[[models]", "is not TOML"),
        ("aliases = 1\n[[models]]\nmodel='a'", "aliases must be tables [[aliases]]"),
        ("[[models]]\nmodel='a'\n[[aliases]]\nname='x'", "aliases[0].models must have models with weights"),
        ("[[models]]\nmodel='a'\n[[aliases]]\nmodels={a=1}", "aliases[0].name must be a text"),
        ("[[models]]\nmodel='a'\n[[aliases]]\nname='x'\nmodels={a=0}", "aliases[0].models.a must be a number above 0"),
        (
            "[[models]]\nmodel='a'\n[[aliases]]\nname='x'\nmodels={a=1}\nshadow={a=101}",
            "aliases[0].shadow must be one model with a percentage of at most 100",
        ),
        ("[[models]]\nmodel = 'a'\non_demand = 1", "models[0].on_demand must be true or false"),
        ("[[models]]\nmodel = 'a'\nidle_s = 5", "`idle_s` of a needs `on_demand = true`"),
        ("memory_gb = 'x'\n[[models]]\nmodel = 'a'", "memory_gb must be a number above 0"),
    ],
)
def test_what_a_file_gets_wrong_is_named(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(CommandError, match=re.escape(problem)):
        read_settings(write(tmp_path, text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"nosuch\.toml cannot be read: No such file"):
        read_settings(tmp_path / "nosuch.toml")


@pytest.mark.parametrize(
    ("models", "shares"),
    [
        ([ModelSettings("a")], [1.0]),
        ([ModelSettings("a"), ModelSettings("b")], [0.5, 0.5]),
        ([ModelSettings("a", kv_share=0.5), ModelSettings("b"), ModelSettings("c")], [0.5, 0.25, 0.25]),
        ([ModelSettings("a", kv_cache_gb=1.0), ModelSettings("b")], [1.0, 1.0]),
        ([ModelSettings("a"), ModelSettings("encoder"), ModelSettings("b")], [0.5, 1.0, 0.5]),
        ([ModelSettings("a", kv_share=1.0), ModelSettings("encoder")], [1.0, 1.0]),
    ],
)
def test_models_without_a_share_divide_the_rest(models: list[ModelSettings], shares: list[float]) -> None:
    assert kv_shares(models, [model.model == "encoder" for model in models]) == shares


def test_a_model_for_which_no_kv_cache_is_left_is_named() -> None:
    with pytest.raises(ValueError, match="nothing is left of the KV caches for b"):
        kv_shares([ModelSettings("a", kv_share=1.0), ModelSettings("b")], [False, False])


def test_an_encoder_takes_no_share_of_the_kv_caches() -> None:
    with pytest.raises(ValueError, match="`kv_share` is not possible with b: .* no KV cache; leave it out"):
        kv_shares([ModelSettings("a"), ModelSettings("b", kv_share=0.5)], [False, True])


def test_names_and_aliases_must_differ() -> None:
    with pytest.raises(CommandError, match="'x' names both a and b"):
        check_names([("x", ModelSettings("a")), ("y", ModelSettings("b", aliases=("x",)))])
    with pytest.raises(CommandError, match="'x' names both a and a"):
        check_names([("x", ModelSettings("a")), ("x", ModelSettings("a"))])


def test_models_with_cores_have_them_alone_and_the_others_share_the_rest() -> None:
    models = [
        ModelSettings("a", cores=2, workers=2),
        ModelSettings("b"),
        ModelSettings("c"),
        ModelSettings("d", cores=4),
    ]
    places = places_of(MACHINE, models)
    assert [[place.cpus for place in where] for where in places] == [
        [(0,), (1,)],
        [(6, 7)],
        [(6, 7)],
        [(2, 3, 4, 5)],
    ]


def test_without_cores_every_model_uses_the_machine() -> None:
    (first,), (second,) = places_of(MACHINE, [ModelSettings("a"), ModelSettings("b")])
    assert first == second
    assert first.cpus == tuple(range(8))


@pytest.mark.parametrize(
    ("models", "problem"),
    [
        ([ModelSettings("a", cores=9)], "ask for 9 cores together .*, and 8 are usable"),
        ([ModelSettings("a", cores=8), ModelSettings("b")], "take all 8 cores, and none is left"),
    ],
)
def test_more_cores_than_there_are_are_refused(models: list[ModelSettings], problem: str) -> None:
    with pytest.raises(CommandError, match=problem):
        places_of(MACHINE, models)


def test_plans_number_the_workers_of_all_models(cache: Path, model_folder: Path) -> None:
    models = [
        ModelSettings(str(model_folder), workers=2, aliases=("x", "y")),
        ModelSettings(str(model_folder), name="other", kv_share=0.25),
    ]
    first, second = plan_models(models, places_of(MACHINE, models), Sizing(None), offline=True)
    assert (first.name, first.first_worker, len(first.places), first.kv_share) == ("my-model", 0, 2, 0.75)
    assert (second.name, second.first_worker, len(second.places), second.kv_share) == ("other", 2, 1, 0.25)
    assert not first.is_essential
    assert aliases_of([first, second], HostSettings(tuple(models))) == (("x=my-model", "y=my-model"), ())
    (alone,) = plan_models(models[:1], places_of(MACHINE, models[:1]), Sizing(None), offline=True)
    assert alone.is_essential


def test_a_size_of_all_workers_is_divided_among_them(cache: Path, model_folder: Path) -> None:
    whole = ModelOptions(kv_total_gb=4.0)
    models = [
        ModelSettings(str(model_folder), name="a", workers=2, options=whole),
        ModelSettings(str(model_folder), name="b"),
    ]
    first, second = plan_models(models, places_of(MACHINE, models), Sizing(None), offline=True)
    assert (first.kv_cache_gb, first.options) == (2.0, whole)
    assert (second.kv_cache_gb, second.kv_share) == (None, 1.0), "what is left is shared among the others"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--config", "FILE", "a"), "give either MODEL, --models or --config"),
        (("--config", "FILE", "--models", "FILE"), "give either MODEL, --models or --config"),
        (("--config", "FILE", "--name", "n"), "--name is for one model, and --config names the models"),
        (("--config", "FILE", "--draft-model", "d"), "--draft-model is for one model, and --config"),
        (("--config", "FILE", "--idle-s", "5"), "--idle-s needs --on-demand"),
        (("--config-poll-s", "1"), "--config-poll-s needs a configuration; name it with --config"),
        (("a", "b", "--name", "n"), "--name is for one model"),
        (("a", "b", "--adapter", "x=/y"), "--adapter is for one model"),
        (("a", "b", "--max-adapters", "2"), "--max-adapters is for one model"),
        (("a", "--models", "FILE"), "give either MODEL or --models"),
        (("--models", "FILE", "--workers", "2"), "--workers is for MODEL"),
        (("--models", "FILE", "--threads", "2"), "--threads is for MODEL"),
        (("--models", "FILE", "--on-demand"), "--on-demand is for MODEL"),
        (("a", "--idle-s", "5"), "--idle-s needs --on-demand"),
        (("a", "--kv-disk-gb", "5"), "--kv-disk-gb needs a directory; name it with --kv-disk"),
        (("a", "--kv-disk-key", "/dev/null"), "--kv-disk-key needs a directory; name it with --kv-disk"),
        (
            ("a", "--workers", "1", "--prefill-workers", "1"),
            "leaves no worker for answers, because a model has 1 worker;",
        ),
    ],
)
def test_flags_that_do_not_go_together_are_refused(
    cache: Path, tmp_path: Path, arguments: tuple[str, ...], problem: str
) -> None:
    path = str(write(tmp_path, FILE))
    result = CliRunner().invoke(cli, ["serve", *(path if one == "FILE" else one for one in arguments)])
    assert result.exit_code == 2
    assert problem in result.stderr


def test_one_model_of_two_that_is_nowhere_is_named(cache: Path, model_folder: Path) -> None:
    result = CliRunner().invoke(cli, ["serve", str(model_folder), "nosuch", "--port", "0"])
    assert result.exit_code == 2
    assert "unknown model 'nosuch'" in result.stderr


def test_one_name_for_two_models_is_refused(cache: Path, model_folder: Path) -> None:
    result = CliRunner().invoke(cli, ["serve", str(model_folder), str(model_folder), "--port", "0"])
    assert result.exit_code == 2
    assert "'my-model' names both" in result.stderr


def test_within_a_budget_every_model_has_a_size(cache: Path, model_folder: Path) -> None:
    (model_folder / "openvino_model.bin").write_bytes(b"x" * (1 << 20))
    models = [
        ModelSettings(str(model_folder), workers=2, kv_share=0.5),
        ModelSettings(str(model_folder), name="b", on_demand=True, idle_s=9.0, kv_cache_gb=1.0),
    ]
    first, second = plan_models(models, places_of(MACHINE, models), Sizing(10 * GIB), offline=True)
    assert first.kv_cache_gb == pytest.approx(0.4 * 0.5 * 10 / 2)
    assert first.kv_cache_bytes == pytest.approx(2 * GIB, abs=2)
    assert first.num_bytes == pytest.approx(3 * GIB + 2 * 1.65 * (1 << 20), abs=4)
    assert (second.is_pinned, second.idle_s, second.kv_cache_bytes) == (False, 9.0, GIB)


def test_within_a_budget_the_store_of_images_counts_as_it_is_given(cache: Path, tmp_path: Path) -> None:
    models = [ModelSettings(str(SHAPES), workers=2, kv_cache_gb=1.0)]

    def num_bytes(**given: float) -> int:
        (plan,) = plan_models(models, places_of(MACHINE, models), Sizing(90 * GIB, **given), offline=True)
        return plan.num_bytes

    usual = num_bytes()
    assert num_bytes(image_cache_gb=3.5) - usual == 2 * int(2.5 * GIB)
    assert num_bytes(image_cache_gb=0.0) == usual - 2 * GIB
    assert num_bytes(max_images=0, image_cache_gb=3.5) < usual - 2 * GIB, "nor is there a process for images"


def test_an_encoder_beside_other_models_needs_no_kv_cache(cache: Path, model_folder: Path, tmp_path: Path) -> None:
    encoder = tmp_path / "encoder"
    shutil.copytree(model_folder, encoder)
    (encoder / "openvino_model.xml").write_text('<port names="input_ids"/><port names="last_hidden_state"/>')
    models = [ModelSettings(str(model_folder)), ModelSettings(str(encoder), name="vectors", on_demand=True)]
    for sizing in (Sizing(None), Sizing(10 * GIB), Sizing(10 * GIB, 1.0)):
        first, second = plan_models(models, places_of(MACHINE, models), sizing, offline=True)
        assert (first.is_encoder, second.is_encoder, second.kv_cache_gb) == (False, True, None)
        assert first.kv_share == 1.0, "vectors need no KV cache"
        assert second.kv_cache_bytes == 0
    (alone,) = plan_models(models[1:], places_of(MACHINE, models[1:]), Sizing(10 * GIB), offline=True)
    assert (alone.is_encoder, alone.kv_cache_gb) == (False, None), "its worker refuses options of generation"


def test_models_that_can_never_be_loaded_within_the_budget_are_refused(cache: Path, model_folder: Path) -> None:
    pinned = [ModelSettings(str(model_folder), kv_cache_gb=1.0), ModelSettings(str(model_folder), name="b")]
    places = places_of(MACHINE, pinned)
    with pytest.raises(CommandError, match=r"always loaded need 3\.0 GiB of memory, and the budget is 1\.5 GiB"):
        plan_models(pinned, places, Sizing(int(1.5 * GIB), 1.0), offline=True)
    on_demand = [pinned[0], ModelSettings(str(model_folder), name="b", on_demand=True, kv_cache_gb=5.0)]
    with pytest.raises(CommandError, match=r"b needs 5\.5 GiB of memory beside 1\.5 GiB for models that are always"):
        plan_models(on_demand, places, Sizing(6 * GIB), offline=True)


def test_a_budget_is_given_or_follows_from_models_on_demand() -> None:
    assert budget_of(2.5, on_demand=False) == int(2.5 * GIB)
    assert budget_of(None, on_demand=False) is None
    assert 0 < (budget_of(None, on_demand=True) or 0) < available_bytes()


def test_a_second_copy_of_the_weights_is_counted() -> None:
    weight_bytes = 1 << 20
    one = weights_in_worker(weight_bytes, has_amx=False, has_adapters=False) - PROCESS_BYTES
    assert weights_in_worker(weight_bytes, has_amx=True, has_adapters=True) - PROCESS_BYTES == 3 * one


def test_the_memory_of_a_process_is_what_it_allocated() -> None:
    before = private_bytes([os.getpid()])
    block = b"x" * (64 << 20)
    assert 60 << 20 <= private_bytes([os.getpid()]) - before <= 80 << 20
    assert private_bytes([2**22 + 1]) == 0
    del block


def test_aliases_with_weights_and_shadows_become_flags_of_the_gateway(cache: Path, tmp_path: Path) -> None:
    text = "[[models]]\nmodel='a'\naliases=['z']\n[[models]]\nmodel='b'\n"
    text += "[[aliases]]\nname='gpt'\nmodels={a=90,b=10}\nshadow={b=2.5}\n[[aliases]]\nname='one'\nmodels={b=3}\n"
    settings = read_settings(write(tmp_path, text))
    plans = [ModelPlan(name, Path("/"), ()) for name in "ab"]
    assert aliases_of(plans, settings) == (("z=a", "gpt=a:90,b:10", "one=b"), ("gpt=b:2.5",))
    check_names([("a", settings.models[0]), ("b", settings.models[1])], settings.aliases)
    with pytest.raises(CommandError, match="the alias 'gpt' refers to 'b', and the models are a"):
        check_names([("a", settings.models[0])], settings.aliases)
    with pytest.raises(CommandError, match="the alias 'gpt' is also a name of a"):
        check_names([("gpt", settings.models[0]), ("b", settings.models[1])], settings.aliases)


def test_only_a_part_of_the_weights_has_to_fit_into_the_memory_of_a_stage(
    cache: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (model_folder / "openvino_model.bin").open("wb") as file:
        file.truncate(4 * GIB)
    monkeypatch.setattr(requirements, "available_bytes", lambda _root: 3 * GIB)
    models = [ModelSettings(str(model_folder))]
    machine = Topology((Core((0,), 0, 0, 0),), (Node(0, 3 * GIB, {}),), None)
    with pytest.raises(CommandError, match=r"needs 4\.5 GiB of memory before its KV cache"):
        plan_models(models, places_of(machine, models), Sizing(None), offline=True)
    (plan,) = plan_models(models, places_of(machine, models), Sizing(None, pipeline=2), offline=True)
    assert plan.directory == model_folder
    sizing = Sizing(10 * GIB, 1.0, pipeline=2)
    (sized,) = plan_models(models, places_of(machine, models), sizing, offline=True)
    assert sized.num_bytes == pytest.approx(requirements.worker_bytes(2 * GIB) + GIB, abs=1 << 20)
