"""The available models: cards from the router, tokenizers and chat templates from their bundles.

The list is polled. An unknown name triggers one refresh at once, shared by all requests that wait for it, and at most
every `MIN_FORCED_INTERVAL_S`. A model that is no longer listed stays available for `FORGET_AFTER_S`, because its
workers may only be restarting; the router decides. In its first `SETTLE_S`, a gateway lets requests wait for the list
and the tokenizer, so that its own restart causes a pause instead of errors.

A host that loads and unloads models (`headrace serve`) may know more of them. A request for a model that is not loaded
waits until the host has loaded it. The same holds for models whose workers an autoscaler starts: the router says which
these are, and when one has a worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

from headrace.common.aliases import Aliases
from headrace.common.telemetry.logs import request_id_var
from headrace.common.vision.bounds import DEFAULT_MAX_IMAGE_PIXELS
from headrace.common.vision.families.known import family_of
from headrace.common.vision.family import FamilyError
from headrace.common.vision.files import FILES as IMAGE_FILES
from headrace.gateway.access.caller import authorization_var, deadline_var
from headrace.gateway.text.chat_template import ChatTemplate, NoTemplate
from headrace.gateway.text.control_text import ControlTexts
from headrace.gateway.text.image_tokens import ImageTokens
from headrace.gateway.text.plain_encoding import PlainEncoding
from headrace.gateway.upstream import bundle
from headrace.gateway.upstream.bundle import BundleError
from headrace.gateway.upstream.model_host import ModelHost
from headrace.gateway.upstream.routers import Upstream
from headrace.protos.host_pb2 import (
    HOSTED_MODEL_STATE_FAILED,
    HOSTED_MODEL_STATE_LOADED,
    HostedModel,
    HostedModelState,
    ServingRules,
)
from headrace.protos.inference_pb2 import TASK_UNSPECIFIED, Task
from headrace.protos.status import Reason, StatusError
from headrace.protos.worker_pb2 import ModelCard

if TYPE_CHECKING:
    from headrace.gateway.text.tokenizer import Tokenizer

POLL_INTERVAL_S = 2.0
POLL_INTERVAL_EMPTY_S = 0.2
MAX_LIST_AGE_S = 5.0
MIN_FORCED_INTERVAL_S = 0.2
FORGET_AFTER_S = 600.0
RETRY_BUNDLE_AFTER_S = 30.0
SETTLE_S = 10.0
GRACE_S = 5.0
"""For which an outage of the list is not logged."""
_MAX_ECHO_CHARS = 100

_LOG = logging.getLogger(__name__)

ModelState: TypeAlias = Literal["unloaded", "loading", "loaded", "unloading", "failed"]


@dataclass(frozen=True, slots=True)
class TextSide:
    """The content of a tokenizer bundle: the tokenizer, and the chat template or the reason why there is none."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    template_problem: str
    controls: ControlTexts
    """Texts of the control tokens."""
    encoding: PlainEncoding
    """Tokenizes texts of callers, in which control tokens are text."""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """Texts of special tokens by their names in templates, such as `bos_token`."""
    image_controls: ControlTexts | None = None
    """Texts of the tokens of images, which callers may not write; None for a model that reads text only."""
    image_encoding: PlainEncoding | None = None
    """Tokenizes texts of callers in which only those are text."""
    image_files: Mapping[str, bytes] = field(default_factory=dict)
    """The files that describe images; empty for a model that reads text only."""
    named_templates: Mapping[str, ChatTemplate] = field(default_factory=dict)
    """The operator's chat templates, which requests name."""

    @property
    def own_template(self) -> ChatTemplate | None:
        """The template, if the model has one of its own."""
        return None if self.template is None or self.template.takes_one_text else self.template


@dataclass(frozen=True, slots=True)
class Model:
    """An available model. `alias` is the name by which the caller asked for it, if that is not its own."""

    card: ModelCard
    text: TextSide
    alias: str = ""
    rules: ServingRules = field(default_factory=ServingRules)
    """What its operator lets requests do."""
    images: ImageTokens | None = None
    """The images that it reads; None if it reads text only."""

    @property
    def name(self) -> str:
        """Name that requests use."""
        return str(self.card.name)

    @property
    def asked_as(self) -> str:
        """Name that the caller used. Keys allow models by these names."""
        return self.alias or self.name

    def chat_template(self, name: str | None = None) -> ChatTemplate:
        """The chat template; with a name, that of the operator's list. Raises `StatusError` if the model has none that
        works, or the list none of this name."""
        if name is not None:
            found = self.text.named_templates.get(name)
            if found is None:
                raise StatusError(Reason.INVALID_FIELD, _no_template(name, self.text), field="chat_template")
            return found
        if self.text.template is None:
            problem = f"the model cannot chat: {self.text.template_problem}; it can complete texts"
            raise StatusError(Reason.UNSUPPORTED, problem, field="messages")
        return self.text.template


def _no_template(name: str, text: TextSide) -> str:
    names = ", ".join(f"'{one}'" for one in text.named_templates)
    known = f"the server has {names}" if names else "the server has none (--chat-template)"
    problem = f"chat_template: there is no template named '{name[:_MAX_ECHO_CHARS]}'; {known}"
    return f"{problem}; leave it out for the model's own"


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model in the list for callers: its name, its state in a word, its task, why it could not be loaded, and its
    card, if it is known. `alias_of` is the model that the name stands for, if it is an alias. `hosted` is what the
    model's host reports."""

    name: str
    state: ModelState
    task: Task
    problem: str = ""
    card: ModelCard | None = None
    alias_of: str = ""
    hosted: HostedModel | None = None


def word_for(state: HostedModelState) -> ModelState:
    """The state of a model that has no live worker. One that was loaded has a worker that is restarting."""
    if state == HOSTED_MODEL_STATE_LOADED:
        return "loading"
    return cast(ModelState, HostedModelState.Name(state).removeprefix("HOSTED_MODEL_STATE_").lower())


@dataclass(slots=True)
class Outage:
    """The time for which every attempt to list the models has failed. Processes of a fleet start in any order, so short
    outages are not logged."""

    clock: Callable[[], float]
    _since_s: float | None = None
    _is_logged: bool = False

    def failed(self, problem: str) -> None:
        """Record a failed attempt."""
        if self._since_s is None:
            self._since_s = self.clock()
        lasts_s = self.clock() - self._since_s
        if not self._is_logged and lasts_s >= GRACE_S:
            _LOG.warning("no router answers, so no model is known to be ready; still trying: %s", problem)
            self._is_logged = True

    def over(self) -> None:
        """Record a successful attempt."""
        if self._is_logged and self._since_s is not None:
            _LOG.info("a router answers again after %.0f s", self.clock() - self._since_s)
        self._since_s, self._is_logged = None, False


@dataclass(slots=True)
class _Entry:
    card: ModelCard
    seen_s: float
    """Monotonic time of the last list that had it."""
    live: bool
    """Whether the latest list had it."""


@dataclass(slots=True)
class _Problem:
    message: str
    since_s: float


class Models:
    """The list of models, kept up to date by `run`."""

    def __init__(
        self,
        upstream: Upstream,
        executor: Executor,
        clock: Callable[[], float] = time.monotonic,
        *,
        settle_s: float = SETTLE_S,
        host: ModelHost | None = None,
        aliases: Aliases | None = None,
        named_templates: Mapping[str, str] | None = None,
    ) -> None:
        """`executor` compiles tokenizers, which takes long. `named_templates` are the sources of the operator's chat
        templates."""
        self._named_templates = named_templates
        self._host = host or ModelHost()
        self._host.changes.add(self._take_hosted)
        self._hosted: Mapping[str, HostedModel] = {}
        self._removed: set[str] = set()
        """Models that the host has had. Their workers do not come back."""
        self._aliases = aliases or Aliases()
        self._settled_s = clock() + settle_s
        self._changed = asyncio.Event()
        self._upstream = upstream
        self._executor = executor
        self._clock = clock
        self._outage = Outage(clock)
        self._entries: dict[str, _Entry] = {}
        self._texts: dict[str, TextSide] = {}
        self._images: dict[tuple[str, int], ImageTokens | None] = {}
        self._problems: dict[str, _Problem] = {}
        self._listed_s = float("-inf")
        self._forced_s = float("-inf")
        self._refreshing: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Refresh the list until cancelled: often while no model is available, else every `POLL_INTERVAL_S`."""
        while True:
            await self._refresh_quietly()
            await asyncio.sleep(POLL_INTERVAL_S if self.ready else POLL_INTERVAL_EMPTY_S)

    @property
    def ready(self) -> bool:
        """Whether at least one model is available or can be loaded for a request, by a recent list."""
        fresh = self._clock() - self._listed_s < 2 * MAX_LIST_AGE_S
        loadable = any(
            model.is_on_demand and model.state != HOSTED_MODEL_STATE_FAILED for model in self._hosted.values()
        )
        live = any(self._model_of(entry) is not None for entry in self._entries.values() if entry.live)
        return fresh and (live or loadable or bool(self._upstream.on_demand)) and not self._host.is_missing

    @property
    def cards(self) -> list[ModelCard]:
        """Cards of the models in the latest list, by name."""
        return [entry.card for _, entry in sorted(self._entries.items()) if entry.live]

    async def listed(self) -> list[Model]:
        """The available models, by name. Raises `StatusError` if the router does not answer."""
        if self._clock() - self._listed_s > MAX_LIST_AGE_S:
            await self._refresh()
        live = (self._model_of(entry) for _, entry in sorted(self._entries.items()) if entry.live)
        return [model for model in live if model is not None]

    @property
    def readers_of_images(self) -> list[str]:
        """Names of the available models that read images."""
        live = (self._model_of(entry) for _, entry in sorted(self._entries.items()) if entry.live)
        return [model.name for model in live if model is not None and model.images is not None]

    async def overview(self) -> list[ListedModel]:
        """All models and aliases that callers may name, by name, loaded or not. Raises `StatusError` if the router does
        not answer."""
        if any(self._lags_behind(name) for name in self._hosted):
            await self.refresh()
        found = {
            model.name: ListedModel(model.name, "loaded", model.card.task, card=model.card)
            for model in await self.listed()
        }
        for name, hosted in self._hosted.items():
            if name not in found or hosted.state != HOSTED_MODEL_STATE_LOADED:
                state = word_for(hosted.state)
                entry = self._entries.get(name)
                found[name] = ListedModel(
                    name, state, hosted.task, hosted.problem, None if entry is None else entry.card
                )
            found[name] = replace(found[name], hosted=hosted)
        for name in self._upstream.on_demand - found.keys():
            entry = self._entries.get(name)
            card = None if entry is None else entry.card
            found[name] = ListedModel(name, "unloaded", TASK_UNSPECIFIED if card is None else card.task, card=card)
        for alias, name in self._aliases.items():
            if name in found:
                found[alias] = replace(found[name], name=alias, alias_of=name)
        return [found[name] for name in sorted(found) if not self._is_created(name)]

    def _is_created(self, name: str) -> bool:
        """Whether a client has created the model of this name. Callers know such a model by its aliases only."""
        hosted = self._hosted.get(name)
        return hosted is not None and hosted.is_created

    async def look_up(self, name: str) -> ListedModel:
        """The entry of this name in the list. Raises `StatusError` if there is none."""
        listed = {model.name: model for model in await self.overview()}
        if name not in listed:
            await self.find(name)  # it may have been added since, or its workers are restarting
            listed = {model.name: model for model in await self.overview()}
        if name not in listed:
            raise StatusError(Reason.NO_CAPACITY, f"model '{name}' has no worker at the moment", retry_after_s=1.0)
        return listed[name]

    async def refresh(self) -> None:
        """List the models now. Raises `StatusError`."""
        if self._refreshing is not None and not self._refreshing.done():
            await asyncio.wait({self._refreshing})  # the current refresh may have begun too early
        await self._refresh()

    async def forget(self, name: str) -> None:
        """Refresh the list of models, and remove this one if it is no longer listed. Raises `StatusError`."""
        await self.refresh()
        if (entry := self._entries.get(name)) is not None and not entry.live:
            del self._entries[name]

    def shadow_of(self, name: str, key: str = "") -> str:
        """The model that gets a copy of the current request for this name; empty for none."""
        return self._aliases.shadow_of(name, key or request_id_var.get())

    async def find(self, name: str, *, loads: bool = True, key: str = "") -> Model:
        """The model of this name, or the only model if the name is empty. If a host must load the model first, this
        waits; with `loads` False it raises MODEL_NOT_LOADED instead, unless the model is known. If several models share
        an alias, requests with the same `key` get the same one. Raises `StatusError`."""
        alias, name = name, self._aliases.model_of(name, key or request_id_var.get())
        while True:
            if loads:
                await self._have_loaded(self._base_of(name), alias or name)
            model = self._find(name)
            is_due = self._clock() - self._forced_s > MIN_FORCED_INTERVAL_S
            if model is None and (is_due or self._lags_behind(name)):
                self._forced_s = self._clock()
                await self._refresh_quietly()
                model = self._find(name)
            if model is not None:
                return model if alias == name else replace(model, alias=alias)
            problem = self._why_not(name)
            awaited = name or self._only_name()
            if not loads and (self._is_awaited(awaited) or not self._is_loaded(self._base_of(name))):
                raise StatusError(Reason.MODEL_NOT_LOADED, f"model '{awaited}' is not loaded")
            if self._is_awaited(awaited):
                await self._have_started(awaited, alias or awaited)
                continue
            left_s = self._settled_s - self._clock()
            if problem.reason is not Reason.NO_CAPACITY or left_s <= 0:
                raise problem
            await self._next_change(left_s)

    def _take_hosted(self, hosted: Mapping[str, HostedModel]) -> None:
        self._removed |= self._hosted.keys() - hosted.keys()
        self._removed -= hosted.keys()
        self._hosted = hosted
        if self._host.aliases is not None:
            self._aliases = self._host.aliases
        self._notify()

    def _base_of(self, name: str) -> str:
        """The model that has to be loaded for requests with this name: the adapter's, if it is one of an adapter."""
        name = name or self._only_name()
        entry = self._entries.get(name)
        if name in self._hosted or (entry is not None and not entry.card.parent):
            return name
        if entry is not None:
            return str(entry.card.parent)
        return next((hosted.name for hosted in self._hosted.values() if name in hosted.adapters), name)

    def _is_loaded(self, name: str) -> bool:
        """Whether requests for this model need not wait for the host: it has loaded the model, or does not know it."""
        hosted = self._hosted.get(name)
        return hosted is None or hosted.state == HOSTED_MODEL_STATE_LOADED

    def _lags_behind(self, name: str) -> bool:
        """Whether the host has loaded a model that is not in the list."""
        entry = self._entries.get(name)
        return name in self._hosted and self._is_loaded(name) and (entry is None or not entry.live)

    async def _have_loaded(self, name: str, asked_as: str) -> None:
        """Make the host load the model, if the host has it and it is not loaded, for callers whose key allows it.
        Raises `StatusError`."""
        if self._is_loaded(name):
            return
        if (authorization := authorization_var.get()) is not None:
            authorization.check(asked_as or name, 0)
        deadline_s = deadline_var.get()
        left_s = None if deadline_s is None else deadline_s - time.monotonic()
        try:
            async with asyncio.timeout(left_s):
                await self._host.load(name)
        except TimeoutError:
            problem = f"model '{name}' was not loaded within the time limit of this request"
            raise StatusError(Reason.DEADLINE, problem) from None
        await self.refresh()

    def _is_awaited(self, name: str) -> bool:
        """Whether the model has no worker, and the router waits for one to be started."""
        entry = self._entries.get(name)
        return name in self._upstream.on_demand and (entry is None or not entry.live)

    async def _have_started(self, name: str, asked_as: str) -> None:
        """Wait until the model has a worker, for callers whose key allows the model. Raises `StatusError`."""
        if (authorization := authorization_var.get()) is not None:
            authorization.check(asked_as, 0)
        deadline_s = deadline_var.get()
        left_s = None if deadline_s is None else deadline_s - time.monotonic()
        try:
            async with asyncio.timeout(left_s):
                await self._upstream.await_model(name)
                await self.refresh()
        except TimeoutError:
            problem = f"model '{name}' was not started within the time limit of this request"
            raise StatusError(Reason.DEADLINE, problem) from None

    async def _next_change(self, timeout_s: float) -> None:
        """Return when the list was refreshed, or after the time limit."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    def close(self) -> None:
        """Release all tokenizers. No encoding may be running."""
        for text in self._texts.values():
            text.tokenizer.close()
        self._texts.clear()
        self._entries.clear()

    def _find(self, name: str) -> Model | None:
        if self._host.is_missing:
            return None
        entry = self._entries.get(name or self._only_name())
        return None if entry is None else self._model_of(entry)

    def _only_name(self) -> str:
        """The name of the only model; empty if there is none, or several."""
        entries = {name: entry for name, entry in self._entries.items() if not entry.card.parent}
        names = {name for name, entry in entries.items() if entry.live} or set(entries)
        names |= self._hosted.keys() | self._upstream.on_demand
        return names.pop() if len(names) == 1 else ""

    def _model_of(self, entry: _Entry) -> Model | None:
        text = self._texts.get(entry.card.tokenizer_sha256)
        if text is None:
            return None
        hosted = self._hosted.get(entry.card.parent or entry.card.name)
        rules = ServingRules() if hosted is None else hosted.rules
        return Model(entry.card, text, rules=rules, images=self._images_of(entry.card, text))

    def _images_of(self, card: ModelCard, text: TextSide) -> ImageTokens | None:
        """The images of a model. Their tokens depend on its files, and on a bound of its workers."""
        if not card.HasField("images") or not text.image_files:
            return None
        key = card.tokenizer_sha256, card.images.max_view_pixels
        if key not in self._images:
            self._images[key] = image_tokens_of(text.image_files, text.tokenizer, card.images.max_view_pixels)
        return self._images[key]

    def _why_not(self, name: str) -> StatusError:
        names = self._entries.keys() | self._hosted.keys() | {alias for alias, _ in self._aliases.items()}
        if not (self._entries or self._hosted) or not self._host.is_known:
            return StatusError(Reason.NO_CAPACITY, "no model is being served yet; try again shortly", retry_after_s=1.0)
        entry = self._entries.get(name or self._only_name())
        if entry is not None:
            what = f"the tokenizer of '{entry.card.name}'"
            problem = self._problems.get(entry.card.tokenizer_sha256)
            if problem is not None:
                return StatusError(Reason.INTERNAL, f"{what} cannot be used: {problem.message}")
            return StatusError(Reason.NO_CAPACITY, f"{what} is still being loaded", retry_after_s=1.0)
        if (name or self._only_name()) in self._hosted:
            problem_text = f"model '{name or self._only_name()}' has no worker at the moment"
            return StatusError(Reason.NO_CAPACITY, problem_text, retry_after_s=1.0)
        known = ", ".join(f"'{known}'" for known in sorted(names)[:20])
        if not name:
            return StatusError(Reason.INVALID_FIELD, f"model is required; there are {known}", field="model")
        echo = name if len(name) <= _MAX_ECHO_CHARS else name[:_MAX_ECHO_CHARS] + "…"
        return StatusError(
            Reason.MODEL_NOT_FOUND, f"The model '{echo}' does not exist; there are {known}", field="model"
        )

    async def _refresh_quietly(self) -> None:
        try:
            await self._refresh()
        except StatusError as error:
            self._outage.failed(error.message)
        else:
            self._outage.over()

    async def _refresh(self) -> None:
        """Refresh the list, or wait for the refresh that is under way."""
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self._list())
        await asyncio.shield(self._refreshing)

    async def _list(self) -> None:
        cards = await self._upstream.list_models()
        now_s = self._listed_s = self._clock()
        for entry in self._entries.values():
            entry.live = False
        for card in cards:
            self._entries[card.name] = _Entry(card, now_s, True)
        for name in [n for n, entry in self._entries.items() if now_s - entry.seen_s > FORGET_AFTER_S]:
            del self._entries[name]
        for name, entry in [*self._entries.items()]:
            if not entry.live and (entry.card.parent or name) in self._removed:
                del self._entries[name]
        wanted = {entry.card.tokenizer_sha256 for entry in self._entries.values()}
        for sha256 in [s for s in self._texts if s not in wanted]:
            del self._texts[sha256]  # freed with the last request that uses it
            self._images = {key: images for key, images in self._images.items() if key[0] != sha256}
        if missing := wanted - self._texts.keys():
            # Requests that wait for their tokenizer are not with a worker yet. For one that cannot be used, none wait.
            loadable = missing - self._problems.keys()
            cards = [entry.card for entry in self._entries.values() if entry.live]
            names = {card.parent or card.name for card in cards if card.tokenizer_sha256 in loadable}
            async with self._upstream.using(names), self._host.using(names):
                for sha256 in sorted(missing):
                    await self._load(sha256)
        self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _load(self, sha256: str) -> None:
        problem = self._problems.get(sha256)
        if problem is not None and self._clock() - problem.since_s < RETRY_BUNDLE_AFTER_S:
            return
        try:
            raw = await self._upstream.get_tokenizer(sha256)
            text = await asyncio.get_running_loop().run_in_executor(
                self._executor, load_text_side, raw, self._named_templates
            )
        except StatusError as error:
            _LOG.info("the tokenizer bundle %s could not be fetched: %s", sha256[:12], error.message)
        except BundleError as error:
            self._problems[sha256] = _Problem(str(error), self._clock())
            _LOG.error("the tokenizer bundle %s cannot be used: %s", sha256[:12], error)
        else:
            self._problems.pop(sha256, None)
            self._texts[sha256] = text
            _LOG.info("loaded the tokenizer bundle %s", sha256[:12])


def load_text_side(raw: bytes, named_templates: Mapping[str, str] | None = None) -> TextSide:
    """Tokenizer and chat template from the bytes of a bundle. `named_templates` are the sources of the operator's
    templates. Raises `BundleError`."""
    from headrace.gateway.text.tokenizer import load_tokenizer  # imports OpenVINO: not before the gateway listens

    files = bundle.read_bundle(raw)
    tokenizer = load_tokenizer(files)
    special_tokens = {**tokenizer.special_tokens, **bundle.special_tokens(files)}
    sources = bundle.template_sources(files)
    if not sources and tokenizer.chat_template is not None:
        sources = {"default": bundle.plain_lines(tokenizer.chat_template)}
    template: ChatTemplate | None = None
    problem = ""
    try:
        template = ChatTemplate(sources, special_tokens) if sources else NoTemplate()
    except BundleError as error:
        _LOG.error("%s", error)
        problem = str(error)
    named = {
        name: ChatTemplate({"default": source}, special_tokens) for name, source in (named_templates or {}).items()
    }
    templates = [*(() if template is None else template.all), *named.values()]
    image_files = {name: files[name] for name in IMAGE_FILES if name in files}
    images = image_tokens_of(image_files, tokenizer) if "config.json" in image_files else None
    reserved = frozenset[int]() if images is None else images.reserved_ids

    def controls_of(texts: Mapping[str, int]) -> ControlTexts:
        return ControlTexts(
            texts,
            cuts=[text for one in templates for text in one.looks_for],
            any_case=any(one.changes_case for one in templates),
        )

    texts = tokenizer.control_texts(bundle.eos_token_ids(files) | reserved, special_tokens)
    controls = controls_of(texts)
    of_images = None if images is None else controls_of({text: i for text, i in texts.items() if i in reserved})
    return TextSide(
        tokenizer,
        template,
        problem,
        controls,
        PlainEncoding(tokenizer, controls),
        special_tokens,
        of_images,
        None if of_images is None else PlainEncoding(tokenizer, of_images),
        {} if images is None else image_files,
        named,
    )


def image_tokens_of(
    files: Mapping[str, bytes], tokenizer: Tokenizer, max_image_pixels: int = DEFAULT_MAX_IMAGE_PIXELS
) -> ImageTokens | None:
    """The images that these files of a model describe; None if it reads text only, or images that are not
    supported."""
    try:
        family = family_of(files, max_image_pixels)
        return None if family is None else ImageTokens(family, tokenizer)
    except FamilyError as error:
        _LOG.warning("a model is served for its text only: %s", error)
        return None
