"""Changes that clients of Ollama may make to a host's models, if the operator allows them (`--ollama-manage`).

    copy, create       another name for a model: an alias of the host
    create from files  a model of a GGUF file that was uploaded, if there is a folder for uploads (--ollama-blobs), and
                       an alias of it. Its own name is not shown, so that its aliases are all alike
    delete             takes such a name away, and removes such a model with its files if it was the last name; what
                       operators have named stays
    keep_alive         unloads a model that requests load: with 0 after the answer, otherwise when no request has used
                       it for so long

All of it needs `headrace serve`, which has the models and knows what clients have made, whichever gateway they used; a
fleet's models are its operator's. A key that is limited to some models manages these only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping

from headrace.common.aliases import Aliases
from headrace.common.tasks import end_tasks
from headrace.gateway.access.caller import authorization_var
from headrace.gateway.checks import invalid
from headrace.gateway.hints import ignored
from headrace.gateway.ollama.blobs import Blobs
from headrace.gateway.text.models import Models
from headrace.gateway.upstream.model_host import ModelHost
from headrace.protos.host_pb2 import HOSTED_MODEL_STATE_LOADED
from headrace.protos.status import Reason, StatusError

LATEST = ":latest"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,127}")
_OPERATOR = "a gateway does not {verb} models unless its operator allows it (--ollama-manage); ask for {instead}"
_LOAD = "headrace models load NAME FILE"
_INSTEAD = {
    "copy": "headrace models alias",
    "create": f"headrace models alias, or {_LOAD}",
    "delete": "headrace models unload, or headrace models rm",
}
_STAYS = "a model that requests do not load stays loaded"
# The longest wait for the next look at a model, and that after a host that did not answer.
_LONGEST_WAIT_S = 3600.0
_RETRY_S = 1.0
_LOG = logging.getLogger(__name__)


class Managing:
    """Changes the names of a host's models, and unloads them."""

    def __init__(
        self,
        models: Models,
        host: ModelHost,
        *,
        is_allowed: bool,
        blobs: Blobs | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`blobs` are the files that clients upload; None: they may not."""
        self._blobs = blobs
        self._models = models
        self._host = host
        self._is_allowed = is_allowed
        self._clock = clock
        self._unloading: set[asyncio.Task[None]] = set()
        self._leaving: dict[str, asyncio.Task[None]] = {}
        """By model, what unloads it once it was not used for long enough."""

    @property
    def unloads(self) -> bool:
        """Whether `keep_alive` has an effect."""
        return self._is_allowed and self._host.has_address

    def check(self, verb: str) -> None:
        """Raise `StatusError` unless the operator allows it."""
        if not self._is_allowed:
            problem = _OPERATOR.format(verb=verb, instead=_INSTEAD[verb])
            raise StatusError(Reason.PERMISSION_DENIED, problem)

    async def name(self, source: str, source_field: str, name: str, name_field: str) -> None:
        """Give a model another name, which may be one that a client has given to another model. Both names are the
        caller's, in these fields. Raises `StatusError`."""
        alias = _new_name(name, name_field)
        self._host.check_address()
        _check_key(alias, name_field)
        _check_key(source.removesuffix(LATEST), source_field)
        model = self._known(source)
        if model is None:
            problem = f"{source_field}: there is no model '{source[:64]}' here"
            raise StatusError(Reason.MODEL_NOT_FOUND, problem, field=source_field)
        if alias in self._host.models:
            raise _is_taken(alias, name_field)
        await self._point(alias, model, name_field)

    async def _point(self, alias: str, model: str, field: str) -> None:
        """Let a name, of this field of the caller, stand for a model. Raises `StatusError`."""
        before = dict(self._aliases.items()).get(alias, model)
        with _in_field(field):
            await self._host.set_alias(alias, model)
        if before != model:
            await self._drop(before)

    async def _drop(self, model: str) -> None:
        """Remove a model that a client has created, with its files, once its requests have ended, if it has no name any
        more. Raises `StatusError`."""
        if not self._is_created(model) or model in self._aliases.models:
            return
        try:
            await self._host.remove(model)
        except StatusError as error:
            if error.reason is not Reason.INVALID_FIELD:
                raise
            return  # it has got a name through another gateway
        await self._models.forget(model)

    def _is_created(self, model: str) -> bool:
        """Whether a client has created this model."""
        return model in self._host.models and self._host.models[model].is_created

    def uploads(self) -> Blobs:
        """The files that clients upload. Raises `StatusError` if they may not."""
        self.check("create")
        self._host.check_address()
        if self._blobs is None:
            problem = "this gateway takes no files of models, because its operator has named no folder for them"
            raise StatusError(Reason.UNSUPPORTED, f"{problem} (--ollama-blobs); ask for {_LOAD}", field="files")
        return self._blobs

    async def make(self, name: str, files: Mapping[str, str]) -> None:
        """Make a model of this name from files that were uploaded, by their names and digests, and load it. It replaces
        one that a client has created under this name. Raises `StatusError`."""
        blobs, own = self.uploads(), _new_name(name, "model")
        _check_key(own, "model")
        before = dict(self._aliases.items()).get(own)
        if own in self._host.models or (before is not None and not self._is_created(before)):
            raise _is_taken(own, "model")
        model = f"{own}@{blobs.content_of(files)}"
        if not self._is_created(model):
            await self._create(blobs, own, model, files)
        try:
            await self._point(own, model, "model")
        except StatusError:
            await self._drop(model)
            raise
        blobs.forget(files)

    async def _create(self, blobs: Blobs, own: str, model: str, files: Mapping[str, str]) -> None:
        """Make and load a model of files. Errors name it as its caller does, `own`."""
        with blobs.laid_out(own, files) as path:
            try:
                await self._host.create(model, str(path))
            except StatusError as error:
                message = error.message.replace(f"{path.parent}/", "").replace(model, own)
                if error.field != "model":
                    raise StatusError(
                        error.reason, message, field=error.field, retry_after_s=error.retry_after_s
                    ) from None
                raise StatusError(error.reason, f"files: {message.removeprefix('model: ')}", field="files") from None

    async def forget(self, name: str) -> None:
        """Remove a name that a client has given, and the model, with its files, if a client has created it and it was
        its last name; its requests end first. Raises `StatusError`."""
        self._host.check_address()
        for alias in (name, name.removesuffix(LATEST)):
            if alias in self._aliases:
                _check_key(alias, "model")
                named = dict(self._aliases.items())[alias]
                with _in_field("model"):
                    await self._host.set_alias(alias, "")
                    await self._drop(named)
                return
        model = self._known(name)
        if model is None or self._is_created(model):
            raise StatusError(Reason.MODEL_NOT_FOUND, f"model: there is no model '{name[:64]}' here", field="model")
        _check_key(model, "model")
        problem = f"model: '{model}' is its operator's; delete takes away only what copy or create have made"
        raise StatusError(
            Reason.PERMISSION_DENIED, f"{problem} (headrace models unload, headrace models rm)", field="model"
        )

    async def unload(self, name: str) -> bool:
        """Unload the model of this name, once its requests have ended, if requests load it again. Others would stay
        unloaded until an operator loads them. Returns whether it is unloaded. Raises `StatusError`."""
        model = self._known(name)
        if model is None or not self._host.models[model].is_on_demand:
            ignored("keep_alive", _STAYS)
            return False
        await self._host.unload(model)
        return True

    def unload_soon(self, name: str) -> None:
        """As `unload`, in the background."""
        task = asyncio.create_task(self._unload_or_log(name))
        self._unloading.add(task)
        task.add_done_callback(self._unloading.discard)

    def stay(self, name: str, seconds: float | None) -> None:
        """Cancel a pending unload, because a request for this model has come. `seconds` is how long the request asks
        the model to stay, or None; for a model that stays loaded anyway, this is noted as a hint."""
        model = self._known(name)
        if model is None or not self._host.models[model].is_on_demand:
            if seconds is not None and seconds > 0:
                ignored("keep_alive", _STAYS)
        elif (leaving := self._leaving.pop(model, None)) is not None:
            leaving.cancel()

    def leave_after(self, name: str, seconds: float) -> None:
        """Unload the model of this name once no request has used it for so long, if requests load it again."""
        model = self._known(name)
        if model is None or not self._host.models[model].is_on_demand:
            return
        self.stay(name, None)
        task = self._leaving[model] = asyncio.create_task(self._leave(model, seconds))
        task.add_done_callback(lambda done: self._leaving.pop(model) if self._leaving.get(model) is done else None)

    async def _leave(self, model: str, seconds: float) -> None:
        """Unload a model after `seconds` without requests. The host also counts requests through other protocols and
        gateways."""
        left_s = seconds
        while left_s > 0:
            await asyncio.sleep(min(left_s, _LONGEST_WAIT_S))
            try:
                hosted = await self._host.latest(model)
            except StatusError:
                left_s = _RETRY_S
                continue
            if hosted is None or hosted.state != HOSTED_MODEL_STATE_LOADED:
                return
            left_s = hosted.last_used_ms / 1000 + seconds - self._clock()
        await self._unload_or_log(model)

    async def _unload_or_log(self, name: str) -> None:
        try:
            await self.unload(name)
        except StatusError as error:
            _LOG.warning("%s is not unloaded: %s", name, error.message)

    async def close(self) -> None:
        """End what runs in the background."""
        await end_tasks(*self._unloading, *self._leaving.values())

    @property
    def _aliases(self) -> Aliases:
        return self._host.aliases or Aliases()

    def _known(self, name: str) -> str | None:
        """The host's model of this name, with or without `:latest`; None if it has none. If an alias stands for several
        models, the one with the largest weight."""
        split = dict(self._aliases.items())
        for one in (name, name.removesuffix(LATEST)):
            model = split.get(one, one)
            if model in self._host.models:
                return model
        if not name and len(self._host.models) == 1:
            return next(iter(self._host.models))
        return None


def _new_name(name: str, field: str) -> str:
    """A name that a caller gives to a model, without `:latest`. Raises `StatusError`."""
    found = name.removesuffix(LATEST)
    if _NAME.fullmatch(found) is None:
        problem = f"{field} must have 1 to 128 letters, digits and . _ : / @ -, and begin with one of the first two"
        raise invalid(field, problem)
    return found


@contextlib.contextmanager
def _in_field(name: str) -> Iterator[None]:
    """Context manager: name this field of the caller in failures of the host."""
    try:
        yield
    except StatusError as error:
        if not error.field:
            raise
        raise StatusError(error.reason, f"{name}: {error.message}", field=name) from None


def _check_key(name: str, field: str) -> None:
    """Raise `StatusError` if the caller's key is limited to other models."""
    authorization = authorization_var.get()
    if authorization is not None and not authorization.may_use(name):
        raise StatusError(Reason.PERMISSION_DENIED, f"{field}: this key is not for model '{name[:64]}'", field=field)


def _is_taken(name: str, field: str) -> StatusError:
    return invalid(field, f"{field}: '{name}' is the name of another model already; choose another one")
