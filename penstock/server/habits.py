"""What a server tells with every answer, whether or not the request asks for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.server.dialects.openai.translate import OpenAICall


@dataclass(frozen=True, slots=True)
class Habits:
    """As whoever started the server has said.

    Attributes:
        usage: streams end with the usage.
        tokens_as_ids: log-probabilities name tokens by their ids.
    """

    usage: bool = False
    tokens_as_ids: bool = False

    def of(self, call: OpenAICall) -> OpenAICall:
        """A call as it is answered."""
        return replace(
            call,
            include_usage=call.include_usage or (self.usage and call.stream),
            tokens_as_ids=call.tokens_as_ids or self.tokens_as_ids,
        )
