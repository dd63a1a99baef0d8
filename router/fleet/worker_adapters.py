"""The LoRA adapters in a worker's last report. Pure."""

from __future__ import annotations

from headrace.protos import worker_pb2


class WorkerAdapters:
    """The adapters of one worker, by name. They stay known while the worker is unreachable."""

    def __init__(self) -> None:
        self._adapters: dict[str, worker_pb2.Adapter] = {}
        self._in_memory: set[str] = set()
        self._max_in_memory = 0
        self.num_changes = 0
        """How many reports had changes."""

    def take(self, message: worker_pb2.WatchResponse) -> None:
        """Apply a report."""
        if not any(map(message.HasField, ("adapters", "adapter_changes", "adapters_in_memory"))):
            return
        self.num_changes += 1
        if message.HasField("adapters"):
            self._adapters = {adapter.name: adapter for adapter in message.adapters.adapters}
            self._max_in_memory = message.adapters.max_in_memory
            self._in_memory = {name for name, adapter in self._adapters.items() if adapter.is_in_memory}
        for name in message.adapter_changes.unloaded:
            self._adapters.pop(name, None)
        for adapter in message.adapter_changes.known:
            self._adapters[adapter.name] = adapter
        if message.HasField("adapters_in_memory"):
            before, self._in_memory = self._in_memory, set(message.adapters_in_memory.names)
            for name in before ^ self._in_memory:
                if name in self._adapters:
                    self._adapters[name].is_in_memory = name in self._in_memory

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

    def message(self) -> worker_pb2.AdapterList:
        """The adapters as the worker reported them."""
        return worker_pb2.AdapterList(adapters=self._adapters.values(), max_in_memory=self._max_in_memory)
