"""What the slots of llama-server's clients last had: tokens that a call names by a number, to be saved and restored."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.server.auth import owner_of
from penstock.server.slot_files import SlotFiles

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from starlette.requests import Request

    from penstock.server.active_call import ActiveCall
    from penstock.server.context import ModelContext

_MOST_SLOTS: Final = 256  # that are remembered, of all owners
_MOST_TOKENS: Final = 2**22
_ID_SLOT: Final = "penstock.id_slot"


class SlotKey(NamedTuple):
    """A slot: each key has its own, of each model."""

    owner: str
    model: str
    number: int


class Slots:
    """Tokens by slot, as many as there is room for: the slot that was used least recently is forgotten first.

    A slot is a name for what a call said, and nothing more: blocks are found by all calls of the same key.

    Attributes:
        files: where they are saved.
    """

    def __init__(self, folder: Path) -> None:
        self.files = SlotFiles(folder)
        self._slots: OrderedDict[SlotKey, tuple[int, ...]] = OrderedDict()
        self._tokens = 0

    def put(self, key: SlotKey, tokens: Sequence[int]) -> None:
        """A slot has these now."""
        self.erase(key)
        self._slots[key] = tuple(tokens)
        self._tokens += len(tokens)
        while len(self._slots) > _MOST_SLOTS or (self._tokens > _MOST_TOKENS and len(self._slots) > 1):
            self._tokens -= len(self._slots.popitem(last=False)[1])

    def get(self, key: SlotKey) -> tuple[int, ...]:
        """What a slot has; nothing where it was not used, or is forgotten."""
        return self._slots.get(key, ())

    def erase(self, key: SlotKey) -> int:
        """Forgets what a slot has; how many tokens that were."""
        tokens = self._slots.pop(key, ())
        self._tokens -= len(tokens)
        return len(tokens)


def note_slot(scope: MutableMapping[str, Any], body: Any) -> None:
    """Notes in a request's scope which slot its body names."""
    if isinstance(body, dict) and type(number := body.get("id_slot")) is int:
        scope[_ID_SLOT] = number


def _slot_of(scope: MutableMapping[str, Any], owner: str, model: ModelContext) -> SlotKey | None:
    """The slot of a call: the one it names, else the first; None where the model has no such slot."""
    number = max(0, scope.get(_ID_SLOT, 0))
    return SlotKey(owner, model.base, number) if number < model.frontend.info.max_num_seqs else None


def left_in_its_slot(call: ActiveCall, sent: Request, context: ModelContext) -> ActiveCall:
    """Has a call leave its first prompt and answer in its slot, where slots may be saved.

    Those with a salt or adapters are left out: whoever restores them would not find what they computed.
    """
    slots, first = context.lifecycle.slots, call.requests[0]
    if slots is None or first.cache_salt or context.frontend.adapters:
        return call
    key = _slot_of(sent.scope, owner_of(sent), context)
    if key is not None:
        said = call.said = []
        prompt = call.generations[0].prompt_ids
        call.at_end.append(lambda: slots.put(key, (*prompt, *said)))
    return call
