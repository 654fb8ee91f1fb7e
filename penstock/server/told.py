"""How many log-probabilities the answers in flight tell, where more than the usual number is told with a token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.config import limits
from penstock.config.errors import OverloadedError, ParameterError
from penstock.config.generation import GenerationRequest


@dataclass(slots=True)
class ToldLogprobs:
    """The sum over the calls of one process, whose memory it bounds; `in_flight` is 0 where nobody asks for many."""

    in_flight: int = 0
    _owners: Counter[str] = field(default_factory=Counter)

    def take(self, requests: Sequence[GenerationRequest], vocab_size: int) -> int:
        """Counts a call's; what it returns is given back when the call has ended.

        Of what there is one key's calls have half at the most, unless it is one call: the other half is left to others.

        Raises:
            ParameterError: the call alone has too many.
            OverloadedError: those in flight leave no room for it.
        """
        wanted, most = sum(_entries(request, vocab_size) for request in requests), limits.MAX_TOLD_LOGPROBS_IN_FLIGHT
        if wanted > most:
            told = f"fewer than {wanted} log-probabilities in one call, at most {most}; send fewer prompts at once"
            raise ParameterError("logprobs", requests[0].sampling.logprobs, told)
        owner = requests[0].owner
        own = self._owners[owner]
        if wanted and (self.in_flight + wanted > most or (owner and own and own + wanted > most // 2)):
            whose = "Your calls tell" if self.in_flight + wanted <= most else "There are"
            told = f"{whose} as many log-probabilities as they may; give max_tokens, or retry when one has ended."
            raise OverloadedError(told)
        self._count(owner, wanted)
        return wanted

    def give_back(self, requests: Sequence[GenerationRequest], taken: int) -> None:
        """Ends what `take` began."""
        self._count(requests[0].owner, -taken)

    def _count(self, owner: str, more: int) -> None:
        self.in_flight += more
        self._owners[owner] += more
        if not self._owners[owner]:
            del self._owners[owner]


def _entries(request: GenerationRequest, vocab_size: int) -> int:
    sampling = request.sampling
    prompt = None if request.prompt_ids is None else len(request.prompt_ids)
    return min(limits.MAX_TOLD_LOGPROBS, sampling.entries(vocab_size, sampling.n, prompt, sampling.max_tokens))
