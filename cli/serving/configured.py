"""Manages the models of `headrace serve --config`: when the file is read again, the host's models are changed to match
it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from headrace.cli.hosting.settings import HostSettings, ModelRules, ModelSettings
from headrace.cli.ovms.configuration import Configuration, read_configuration
from headrace.cli.serving.host import CannotLoadError, ModelHost, NoSuchModelError
from headrace.cli.serving.plan import ModelPlan
from headrace.common.commands import CommandError


@dataclass(frozen=True, slots=True)
class Reloaded:
    """The result of a reload: whether it changed any model, and the models that are not served as the file says."""

    has_changed: bool
    problems: tuple[str, ...] = ()


@dataclass(slots=True)
class ModelsFile:
    """A configuration that can be read again. `defaults` has the options of each model that the file does not say.
    `poll_s` is the time between looks at it; 0 for none."""

    path: Path
    defaults: ModelSettings
    poll_s: float = 0.0
    last: Configuration = field(init=False, default=Configuration(()))

    def read(self) -> Configuration:
        """Read the file. Raises CommandError if it is not a configuration file of OVMS."""
        found = read_configuration(self.path)
        ours = self.defaults
        models = tuple(
            replace(
                model,
                workers=ours.workers,
                threads=model.threads or ours.threads,
                on_demand=ours.on_demand,
                idle_s=ours.idle_s,
            )
            for model in found.models
        )
        self.last = replace(found, models=models)
        return self.last

    def settings(self) -> tuple[HostSettings, list[str]]:
        """The models for a start, and lines about settings without effect and models that are not served. Raises
        CommandError if no model can be served."""
        found = self.read()
        if not found.models:
            why = "; ".join(found.problems) or "it names none"
            raise CommandError(f"{self.path} has no model that can be served: {why}")
        return HostSettings(found.models), lines_of(found)


def lines_of(found: Configuration) -> list[str]:
    """Lines for the operator about a configuration."""
    return [*found.notes, *(f"not served: {problem}" for problem in found.problems)]


@dataclass(slots=True)
class ConfiguredModels:
    """The models of a file that has been read. `planned` makes the plan of a model from its settings and the number of
    its first worker; it may raise CommandError. `log` gets lines for the operator."""

    file: ModelsFile
    host: ModelHost
    planned: Callable[[ModelSettings, int], ModelPlan]
    log: Callable[[str], None]
    served: dict[str, ModelSettings] = field(init=False)
    """The models that the host has of the file, as the file described them."""
    _lines: Sequence[str] = field(init=False)
    _failed: set[str] = field(init=False, default_factory=set)
    """Models that could not be loaded at the last reload."""
    _reloading: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self.served = {model.name: model for model in self.file.last.models if model.name is not None}
        self._lines = lines_of(self.file.last)

    async def reload(self) -> Reloaded:
        """Read the file again, and return when the host has its models. Models whose requests run are unloaded after
        these. Raises CommandError, and changes nothing, if it is not a configuration file."""
        async with self._reloading:
            found = await asyncio.to_thread(self.file.read)
            self._tell(found)
            wanted = {one.name: one for one in found.models if one.name is not None}
            refused = {problem.partition(":")[0] for problem in found.problems}
            # A model whose new settings are wrong stays as it is.
            gone = [name for name in self.served if name not in wanted and name not in refused]
            changed = [name for name, one in wanted.items() if self.served.get(name) != one]
            for name in gone:
                self.log(f"{name} is unloaded: {self.file.path} does not name it any more")
            await asyncio.gather(*map(self._remove, gone))
            problems = [*found.problems]
            problems += [problem for name in changed if (problem := await self._change(wanted[name]))]
            again = self._failed & self.served.keys() - set(changed)
            loads = [self._loaded(name) for name in (*changed, *sorted(again)) if name in self.served]
            problems += [problem for problem in await asyncio.gather(*loads) if problem]
            return Reloaded(bool(gone or changed or again), tuple(problems))

    def _tell(self, found: Configuration) -> None:
        """Log the settings without effect and the models that are not served, if they are new."""
        lines = lines_of(found)
        for line in lines:
            if line not in self._lines:
                self.log(line)
        self._lines = lines

    async def _remove(self, name: str) -> None:
        del self.served[name]
        try:
            await self.host.remove(name)
        except NoSuchModelError:
            return  # an operator removed it

    async def _change(self, model: ModelSettings) -> str:
        """Add or change a model. Returns a description of the error; empty on success."""
        assert model.name is not None, "configurations name their models"
        name = model.name
        before = self.served.get(model.name)
        if before is not None and replace(before, rules=ModelRules()) == replace(model, rules=ModelRules()):
            self.host.set_rules(name, model.rules)
        else:
            try:
                await self.host.add(name, lambda first: self.planned(model, first))
            except CommandError as error:
                self.log(f"not served: {name}: {error.message}")
                return f"{name}: {error.message}"
        self.served[name] = model
        return ""

    async def _loaded(self, name: str) -> str:
        """Wait until a model is loaded. Returns the reason if it fails to load; empty on success."""
        self._failed.discard(name)
        try:
            await self.host.load(name, by_operator=True)
        except NoSuchModelError:
            return f"{name}: an operator has removed it"
        except CannotLoadError as error:
            self._failed.add(name)
            return f"{name}: {error}"
        return ""

    async def follow(self) -> None:
        """Reload whenever the file has changed, until cancelled."""
        seen = self._state()
        while True:
            await asyncio.sleep(self.file.poll_s)
            if (now := self._state()) == seen or now is None:
                continue
            seen = now
            try:
                await self.reload()
            except CommandError as error:
                self.log(f"the configuration stays as it was: {error.message}")

    def _state(self) -> tuple[int, int, int] | None:
        try:
            found = self.file.path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size
