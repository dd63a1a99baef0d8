"""The turns of a conversation, what goes with its next question, and its form in a file (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.cli.chat.attachments import TextFile
from headrace.common.commands import CommandError

_ROLES = ("user", "assistant")
_FORM = 1


@dataclass(slots=True)
class Conversation:
    """The messages so far, and the attachments of the next question: images as data URLs, and texts. A turn is added
    only when its answer has arrived, in whole or in part. Then, or when the server refuses the question, the
    attachments are dropped."""

    system: str | None = None
    images: list[str] = field(default_factory=list)
    texts: list[TextFile] = field(default_factory=list)
    turns: list[dict[str, Any]] = field(default_factory=list)

    def attach(self, found: str | TextFile) -> None:
        """Add an image or a text to the attachments of the next question."""
        if isinstance(found, TextFile):
            self.texts.append(found)
        else:
            self.images.append(found)

    def user_turn(self, question: str) -> dict[str, Any]:
        """The message of a question, with the attachments."""
        text = "\n".join([*(one.quoted for one in self.texts), question])
        if not self.images:
            return {"role": "user", "content": text}
        parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in self.images]
        return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}

    def messages_with(self, turn: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """The messages to send for the answer to this turn."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        return [*head, *self.turns, turn]

    def add(self, turn: dict[str, Any], answer: str) -> None:
        """Add a turn and its answer."""
        self.turns += [turn, {"role": "assistant", "content": answer}]
        self.drop_attachments()

    def take_back(self) -> dict[str, Any]:
        """Remove the last question and its answer, and return the question. Raises CommandError if there is none."""
        if not self.turns:
            raise CommandError("there is no answer yet to give again")
        *self.turns, turn, _answer = self.turns
        return turn

    def drop_attachments(self) -> None:
        """Forget the images and texts for the next question."""
        self.images.clear()
        self.texts.clear()

    def reset(self) -> None:
        """Forget all turns, and what would go with the next question."""
        self.turns.clear()
        self.drop_attachments()

    @property
    def document(self) -> dict[str, Any]:
        """The content of a file with this conversation."""
        return {"headrace_chat": _FORM, "system": self.system, "turns": self.turns}

    def replace(self, document: Mapping[str, Any]) -> None:
        """Replace this conversation by the one in a file. Raises CommandError, and changes nothing, if the file has
        none."""
        system, turns = document.get("system"), document.get("turns")
        if document.get("headrace_chat") != _FORM or not isinstance(system, str | None):
            raise CommandError("it is no saved conversation")
        if not isinstance(turns, list) or len(turns) % 2 or not all(map(_is_turn, turns, _ROLES * (len(turns) // 2))):
            raise CommandError("its turns are not valid")
        self.system, self.turns = system, turns
        self.drop_attachments()


def _is_turn(turn: object, role: str) -> bool:
    return isinstance(turn, dict) and turn.get("role") == role and isinstance(turn.get("content"), str | list)
