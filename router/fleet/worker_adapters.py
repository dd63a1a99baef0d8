"""The LoRA adapters in a worker's last report. Pure."""

from __future__ import annotations

from collections.abc import Callable

from headrace.protos import worker_pb2
from headrace.protos.model_identity import model_identity


class WorkerAdapters:
    """The adapters of one worker, by name. They stay known while the worker is unreachable."""

    def __init__(
        self, on_change: Callable[[str, worker_pb2.Adapter | None], None] = lambda name, adapter: None
    ) -> None:
        """`on_change` is called when the worker has unloaded an adapter (None), or has other files under its name. It
        is not called for what a worker lost because it restarted."""
        self._on_change = on_change
        self._epoch = 0
        self._adapters: dict[str, worker_pb2.Adapter] = {}
        self._in_memory: set[str] = set()
        self._max_in_memory = 0
        self.num_changes = 0
        """How many reports had changes."""

    def take(self, message: worker_pb2.WatchResponse) -> None:
        """Apply what a report of the worker says about its adapters."""
        if not any(map(message.HasField, ("adapters", "adapter_changes", "adapters_in_memory"))):
            return
        self.num_changes += 1
        changes: dict[str, worker_pb2.Adapter | None] = {}
        if message.HasField("adapters"):
            old, self._adapters = self._adapters, {adapter.name: adapter for adapter in message.adapters.adapters}
            if message.epoch == self._epoch:
                changes = {name: self._adapters.get(name) for name in old if self._differs(name, old[name])}
            self._epoch = message.epoch
            self._max_in_memory = message.adapters.max_in_memory
            self._in_memory = {name for name, adapter in self._adapters.items() if adapter.is_in_memory}
        for name in message.adapter_changes.unloaded:
            self._adapters.pop(name, None)
            changes[name] = None
        for adapter in message.adapter_changes.known:
            if adapter.name in self._adapters and self._differs(adapter.name, adapter):
                changes[adapter.name] = adapter
            self._adapters[adapter.name] = adapter
        if message.HasField("adapters_in_memory"):
            before, self._in_memory = self._in_memory, set(message.adapters_in_memory.names)
            for name in before ^ self._in_memory:
                if name in self._adapters:
                    self._adapters[name].is_in_memory = name in self._in_memory
        for name, changed in changes.items():
            self._on_change(name, changed)

    def _differs(self, name: str, other: worker_pb2.Adapter) -> bool:
        """Whether the worker does not know an adapter of this name with the files of the other."""
        known = self._adapters.get(name)
        return known is None or (known.path, known.sha256) != (other.path, other.sha256)

    def sha256(self, name: str) -> str:
        """The hash of an adapter's files; empty if the worker does not know it."""
        adapter = self._adapters.get(name)
        return "" if adapter is None else adapter.sha256

    def find(self, name: str) -> worker_pb2.Adapter | None:
        """The adapter with this name, or None."""
        return self._adapters.get(name)

    def all(self) -> list[worker_pb2.Adapter]:
        """All adapters, sorted by name."""
        return [adapter for _, adapter in sorted(self._adapters.items())]

    def identities(self, card: worker_pb2.ModelCard) -> set[str]:
        """The identities of the card's model without and with each of the adapters."""
        return {model_identity(card), *(model_identity(card, each.sha256) for each in self._adapters.values())}

    def message(self) -> worker_pb2.AdapterList:
        """The adapters as the worker reported them."""
        return worker_pb2.AdapterList(adapters=self._adapters.values(), max_in_memory=self._max_in_memory)
