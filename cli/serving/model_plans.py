"""Decides for each model of a host which files it has, where its workers run, and their share of the KV caches."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.cli.errors import CommandError
from headrace.cli.hosting.finding import find_model
from headrace.cli.hosting.settings import ModelSettings, check_names, kv_shares
from headrace.cli.serving.placement import WorkerPlace, place_workers, share_cores
from headrace.cli.serving.plan import ModelPlan
from headrace.cli.serving.topology import Topology


def places_of(topology: Topology, models: Sequence[ModelSettings]) -> list[tuple[WorkerPlace, ...]]:
    """The places of each model's workers. Raises CommandError if the cores do not suffice."""
    machines = share_cores(topology, [model.cores for model in models])
    return [
        place_workers(machine, model.workers, model.threads) for machine, model in zip(machines, models, strict=True)
    ]


def plan_models(
    models: Sequence[ModelSettings], places: Sequence[tuple[WorkerPlace, ...]], *, offline: bool
) -> list[ModelPlan]:
    """A plan for each model, after pulling or converting it if necessary. Raises CommandError if a model is unknown,
    or if the weights do not fit into memory."""
    try:
        shares = kv_shares(models)
    except ValueError as error:
        raise CommandError(str(error)) from None
    plans: list[ModelPlan] = []
    first_worker = 0
    for model, where, kv_share in zip(models, places, shares, strict=True):
        directory, found_name = find_model(model.model, offline=offline, num_workers=len(where))
        plans.append(
            ModelPlan(
                name=model.name or found_name,
                directory=directory,
                places=where,
                first_worker=first_worker,
                kv_share=kv_share,
                kv_cache_gb=model.kv_cache_gb,
                max_context_tokens=model.max_context_tokens,
                adapters=model.adapters,
                max_adapters=model.max_adapters,
                is_essential=len(models) == 1,
            )
        )
        first_worker += len(where)
    check_names([(plan.name, model) for plan, model in zip(plans, models, strict=True)])
    return plans


def aliases_of(plans: Sequence[ModelPlan], models: Sequence[ModelSettings]) -> tuple[str, ...]:
    """Other names of the models, as ALIAS=NAME."""
    return tuple(f"{alias}={plan.name}" for plan, model in zip(plans, models, strict=True) for alias in model.aliases)
