"""Decides the files of each model of a host, the places of its workers, and their share of the KV caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace.cli.hosting.finding import find_model
from headrace.cli.hosting.memory import check_budget, kv_cache_gb, weights_in_worker
from headrace.cli.hosting.settings import HostSettings, ModelSettings, kv_shares
from headrace.cli.models.requirements import image_bytes
from headrace.cli.serving.placement import WorkerPlace, place_workers, share_cores
from headrace.cli.serving.plan import ModelPlan, num_stages
from headrace.cli.serving.ranks import Ranks
from headrace.cli.serving.topology import Topology
from headrace.common.commands import CommandError
from headrace.common.host_memory import GIB
from headrace.common.model_files.heads import heads_kind, heads_weights
from headrace.common.model_files.networks import weights_in
from headrace.common.model_files.task import task_of
from headrace.common.model_files.vision_networks import vision_weights_in

WHOLE_MODELS = Ranks()


def places_of(
    topology: Topology, models: Sequence[ModelSettings], ranks: Ranks = WHOLE_MODELS
) -> list[tuple[WorkerPlace, ...]]:
    """The places of each model's workers. Raises CommandError if the cores do not suffice."""
    machines = share_cores(topology, [model.cores for model in models])
    return [
        place_workers(machine, model.workers, model.threads, ranks.of(model, machine))
        for machine, model in zip(machines, models, strict=True)
    ]


def with_usual_workers(model: ModelSettings, of_all: Mapping[str, Any]) -> ModelSettings:
    """The model as it is placed, with the options of all models' workers. A pipeline has one worker, because a stage
    computes for one at a time; other models have the usual number, unless theirs is given."""
    is_pipeline = num_stages(model.options.worker, of_all) > 1
    return replace(model, workers=1) if is_pipeline and model.workers is None else model


@dataclass(frozen=True, slots=True)
class Sizing:
    """How large models are: the memory budget of all together (None for no limit), the KV cache of each worker that
    has no size of its own, in GiB, whether the CPU has AMX, and whether flags give the models adapters or a draft
    model. Workers keep `image_cache_gb` GiB of states of images, or the default; with `max_images` of 0, none. The
    layers of models are divided among `pipeline` stages, of which one is here; None: all are here."""

    budget_bytes: int | None
    kv_cache_gb: float | None = None
    has_amx: bool = False
    has_adapters: bool = False
    draft_model: Path | None = None
    image_cache_gb: float | None = None
    max_images: int | None = None
    pipeline: int | None = None

    def stages_of(self, own: Mapping[str, Any]) -> int:
        """The number of stages among which a model is divided, from its own worker options and those for all models."""
        return num_stages(own, {"pipeline": self.pipeline})


def plan_models(
    models: Sequence[ModelSettings],
    places: Sequence[tuple[WorkerPlace, ...]],
    sizing: Sizing,
    *,
    offline: bool,
) -> list[ModelPlan]:
    """A plan for each model, after pulling or converting it if necessary. Raises CommandError if a model is unknown,
    or if the models do not fit into memory."""
    found = [
        find_model(model.model, offline=offline, num_workers=len(where) / sizing.stages_of(model.options.worker))
        for model, where in zip(models, places, strict=True)
    ]
    try:
        shares = kv_shares(models, [bool(task_of(directory)) for directory, _ in found])
    except ValueError as error:
        raise CommandError(str(error)) from None
    plans: list[ModelPlan] = []
    first_worker = 0
    for model, one, where, kv_share in zip(models, found, places, shares, strict=True):
        plan = plan_model(model, one, where, kv_share, sizing, first_worker=first_worker)
        plans.append(replace(plan, is_essential=len(models) == 1 and plan.is_pinned))
        first_worker += len(where)
    # No model here generates text, so options for generation are wrong.
    if all(plan.is_encoder for plan in plans):
        plans = [replace(plan, is_encoder=False) for plan in plans]
    if sizing.budget_bytes is not None:
        check_budget([(plan.name, plan.num_bytes, plan.is_pinned) for plan in plans], sizing.budget_bytes)
    return plans


def plan_model(
    model: ModelSettings,
    found: tuple[Path, str],
    places: tuple[WorkerPlace, ...],
    kv_share: float,
    sizing: Sizing,
    *,
    first_worker: int,
) -> ModelPlan:
    """The plan of one model, whose directory and name were `found`."""
    directory, found_name = found
    total_gb = model.options.kv_total_gb
    plan = ModelPlan(
        name=model.name or found_name,
        directory=directory,
        places=places,
        first_worker=first_worker,
        kv_share=kv_share,
        kv_cache_gb=model.kv_cache_gb if total_gb is None else total_gb / len(places),
        is_essential=False,
        is_pinned=not model.on_demand,
        is_encoder=bool(task_of(directory)),
        idle_s=model.idle_s,
        options=replace(model.options, worker=_own(model)),
        rules=model.rules,
    )
    return plan if sizing.budget_bytes is None else _sized(plan, sizing, sizing.budget_bytes)


def _own(model: ModelSettings) -> dict[str, Any]:
    """The options of this model's workers, by their names in `worker_flags`."""
    named = {
        "max_context_tokens": model.max_context_tokens,
        "adapters": model.adapters,
        "max_adapters": model.max_adapters,
    }
    return {**model.options.worker, **{option: value for option, value in named.items() if value is not None}}


def _sized(plan: ModelPlan, sizing: Sizing, budget_bytes: int) -> ModelPlan:
    """The plan with its memory, within a budget."""
    num_workers = len(plan.places)
    given_gb = plan.kv_cache_gb or sizing.kv_cache_gb or kv_cache_gb(budget_bytes, plan.kv_share, num_workers)
    each_gb = 0.0 if plan.is_encoder else given_gb
    files = weights_in(plan.directory)
    own = plan.options.worker
    draft_model = own.get("draft_model") or sizing.draft_model
    if draft_model is not None:
        files += weights_in(draft_model) if heads_kind(draft_model) is None else heads_weights(draft_model)
    weight_bytes = sum(file.stat().st_size for file in files) // sizing.stages_of(own)
    has_adapters = bool(sizing.has_adapters or own.get("adapters") or own.get("max_adapters"))
    base_bytes = weights_in_worker(weight_bytes, has_amx=sizing.has_amx, has_adapters=has_adapters)
    if own.get("max_images", sizing.max_images) != 0:
        vision_bytes = sum(file.stat().st_size for file in vision_weights_in(plan.directory))
        base_bytes += image_bytes(vision_bytes, own.get("image_cache_gb", sizing.image_cache_gb))
    cache_bytes = int(each_gb * GIB)
    return replace(
        plan,
        kv_cache_gb=plan.kv_cache_gb if plan.is_encoder else given_gb,
        kv_cache_bytes=num_workers * cache_bytes,
        num_bytes=num_workers * (base_bytes + cache_bytes),
    )


def aliases_of(plans: Sequence[ModelPlan], settings: HostSettings) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Other names of the models, and the shadows of some names, as flags of the gateway have them."""
    named = zip(plans, settings.models, strict=True)
    own = [f"{alias}={plan.name}" for plan, model in named for alias in model.aliases]
    shared = [
        f"{alias.name}={alias.models[0][0]}"
        if len(alias.models) == 1
        else f"{alias.name}={','.join(f'{name}:{weight:g}' for name, weight in alias.models)}"
        for alias in settings.aliases
    ]
    shadows = [f"{alias.name}={alias.shadow[0]}:{alias.shadow[1]:g}" for alias in settings.aliases if alias.shadow]
    return (*own, *shared), tuple(shadows)
