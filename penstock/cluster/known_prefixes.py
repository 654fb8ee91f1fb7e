"""What is known of the prefixes that each engine has cached: what it told, and what it was sent since."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from penstock.core.policies.naming import namespace_of, prefix_keys
from penstock.core.request import EngineRequest
from penstock.transfer.prefix_names import PrefixNames

MOST_BLOCKS: Final = 2048  # of a prompt that are looked up: behind them all engines are alike
MOST_TOLD: Final = 1 << 18  # blocks that are remembered of an engine
MOST_EXPECTED: Final = 1 << 14


class PromptNames:
    """The names of a prompt's whole blocks: those of its owner, and of what everybody may find."""

    def __init__(
        self, names: PrefixNames, request: EngineRequest, block_size: int, most: int = MOST_BLOCKS, *, shared: bool
    ) -> None:
        """Of `most` blocks; `shared`: whether owners find each other's prefixes."""
        space, owner = namespace_of(request, caching=True, shared=shared)
        keys = prefix_keys(list(request.prompt_ids[: most * block_size]), request)[0]
        self.own: Sequence[int] = list(names.chain(keys, block_size, space, owner))
        self.size = block_size
        self._public: list[int] = []
        self._more: Iterator[int] = iter(()) if owner is None else names.chain(keys, block_size, space, None)

    def public(self, block: int) -> int:
        """The name of a block as everybody's; computed when it is first asked for. 0 for none."""
        while len(self._public) <= block:
            self._public.append(next(self._more, 0))
        return self._public[block]


class KnownPrefixes:
    """Blocks that an engine has, or will have when it has computed what it was sent. What is held is bounded."""

    def __init__(self) -> None:
        self._told: set[int] = set()
        self._expected: dict[int, None] = {}  # the oldest first

    def __len__(self) -> int:
        return len(self._told) + len(self._expected)

    def hear(self, news: Sequence[int]) -> None:
        """Takes names of blocks that came, and less than 0 of those that went, in order."""
        for name in news:
            self._expected.pop(abs(name), None)
            if name < 0:
                self._told.discard(-name)
            elif len(self._told) < MOST_TOLD:
                self._told.add(name)

    def expect(self, names: Sequence[int]) -> None:
        """The engine is sent a prompt of these blocks."""
        for name in names:
            if name not in self._told:
                self._expected.pop(name, None)
                self._expected[name] = None
        while len(self._expected) > MOST_EXPECTED:
            del self._expected[next(iter(self._expected))]

    def cached(self, prompt: PromptNames) -> int:
        """How many tokens of a prompt are there from its beginning, in whole blocks. Costs a look a block of these."""
        for block, name in enumerate(prompt.own):
            if not (name in self._told or name in self._expected or prompt.public(block) in self._told):
                return block * prompt.size
        return len(prompt.own) * prompt.size

    def forget(self) -> None:
        """The engine has gone, and all it had."""
        self._told, self._expected = set(), {}
