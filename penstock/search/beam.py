"""Beam search: the most probable continuations, several kept at a time.

Scores, length penalty and stopping rules are those of transformers' `generate(num_beams=…)`. The search runs over an
engine's ordinary requests: each step asks for one token after every beam, with log-probabilities; all but a beam's last
token is found in the prefix cache, so a step computes one token a beam.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from penstock.config import limits
from penstock.config.adapters import activated
from penstock.config.errors import ContextLengthError, EngineDeadError, ParameterError, PenstockError
from penstock.config.generation import GenerationRequest
from penstock.config.logprobs import check_mode, is_many
from penstock.config.sampling import SamplingParams
from penstock.core.protocol import TokenLogprobs
from penstock.core.request import EngineOutput, EngineRequest, FinishReason
from penstock.engine.frontend import Frontend
from penstock.engine.generation import TextGeneration

# What changes the distribution tokens are chosen by, of which an engine reports the model's own.
_SAMPLED: Final = (
    "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "allowed_token_ids", "bad_words",
    "bad_words_ids", "min_tokens", "prompt_logprobs", "banned_strings", "logprob_token_ids",
    "guidance_scale", "token_healing", "logits_processors",
)  # fmt: skip
_NEVER: Final = float("-inf")
Candidates = Sequence[tuple[int, float]]
"""Tokens after a beam and their log-probabilities, the most probable first."""


@dataclass(frozen=True, slots=True)
class BeamParams:
    """How to search.

    Attributes:
        width: beams kept at a time.
        n: how many answers are given, the best first; at most `width`.
        max_tokens: longest answer, None for what the context leaves room for.
        length_penalty: a finished beam's score is its log-probability divided by its length to this power; above 0
            prefers long answers, below 0 short ones.
        early_stopping: True ends when `width` beams have finished; False when the best running beam cannot be better
            at its present length; "never" when it cannot be at any length.
        ignore_eos: go on past the model's end-of-sequence tokens.
        stop_token_ids: token ids that end a beam besides the model's own.

    Raises:
        ParameterError: a value is outside its range.
    """

    width: int = 4
    n: int = 1
    max_tokens: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, value, top in (("beam_width", self.width, limits.MAX_TOP_LOGPROBS), ("n", self.n, self.width)):
            if type(value) is not int or not 1 <= value <= top:
                raise ParameterError(name, value, f"an integer from 1 to {top}")
        if self.early_stopping not in (True, False, "never"):
            raise ParameterError("early_stopping", self.early_stopping, 'true, false or "never"')
        if not isinstance(self.length_penalty, (int, float)) or not -10 <= self.length_penalty <= 10:
            raise ParameterError("length_penalty", self.length_penalty, "a number from -10 to 10")
        if self.max_tokens is not None and not (type(self.max_tokens) is int and self.max_tokens >= 1):
            raise ParameterError("max_tokens", self.max_tokens, "an integer of at least 1")


@dataclass(frozen=True, slots=True)
class Beam:
    """A continuation.

    Attributes:
        tokens: an end-of-sequence or stop token included.
        logprobs: one entry a token.
        total: the sum of their log-probabilities.
        score: once it has finished: the total under the length penalty.
        finish_reason: STOP or LENGTH once it has finished.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    total: float = 0.0
    score: float = _NEVER
    finish_reason: FinishReason | None = None


@dataclass(slots=True)
class BeamSearch:
    """The state of one search; knows tokens and scores alone.

    Attributes:
        stop_ids: tokens that end a beam.
        max_tokens: length at which every beam ends.
        running: beams to continue, the best first; none when the search is over.
        finished: the best finished beams, the best first.
    """

    params: BeamParams
    stop_ids: frozenset[int]
    max_tokens: int
    running: list[Beam] = field(default_factory=lambda: [Beam()])
    finished: list[Beam] = field(default_factory=list)

    @property
    def alternatives(self) -> int:
        """Candidates needed after each beam: enough to fill all beams from one, were the likeliest all stop tokens."""
        return self.params.width + len(self.stop_ids)

    def advance(self, candidates: Sequence[Candidates]) -> None:
        """Takes the candidates after each running beam."""
        width = self.params.width
        found = [
            (beam.total + logprob, index, rank, token, logprob)
            for index, (beam, after) in enumerate(zip(self.running, candidates, strict=True))
            for rank, (token, logprob) in enumerate(after, 1)
        ]
        found.sort(key=lambda candidate: (-candidate[0], candidate[1], candidate[3]))
        going, ended = [], []
        for place, (total, index, rank, token, logprob) in enumerate(found):
            beam = self.running[index]
            entry = TokenLogprobs(token, logprob, rank, tuple(candidates[index]))
            longer = Beam((*beam.tokens, token), (*beam.logprobs, entry), total)
            if token not in self.stop_ids and len(longer.tokens) < self.max_tokens:
                going.append(longer)
            elif place < width:  # longer ones further behind only continue; they do not end
                ended.append(self._end(longer))
        self.finished = sorted([*self.finished, *ended], key=lambda beam: -beam.score)[:width]
        self.running = going[:width]
        if self._is_over():
            self.running = []

    def _end(self, beam: Beam) -> Beam:
        reason = FinishReason.STOP if beam.tokens[-1] in self.stop_ids else FinishReason.LENGTH
        score = beam.total / len(beam.tokens) ** self.params.length_penalty
        return Beam(beam.tokens, beam.logprobs, beam.total, score, reason)

    def _is_over(self) -> bool:
        if not self.running:
            return True
        if len(self.finished) < self.params.width:
            return False
        if self.params.early_stopping is True:
            return True
        best, penalty = self.running[0], self.params.length_penalty
        whole = self.params.early_stopping == "never" and penalty > 0
        length = self.max_tokens if whole else len(best.tokens)
        return bool(best.total / length**penalty <= self.finished[-1].score)


async def beam_search(frontend: Frontend, request: GenerationRequest, params: BeamParams) -> TextGeneration:
    """The `params.n` best continuations of a prompt, as sequences of one answer, the best first.

    Of the request's sampling, the stop strings, what is shown and `logprobs` count; temperature and the like do not.

    Raises:
        RequestError: the prompt does not fit, the request asks for what a search does not do, or more candidates are
            needed than an engine reports.
        EngineDeadError: there is no engine. What fails later is told by the answer's sequences.
    """
    frontend.text.pooling.check_generates()
    for name in _SAMPLED:
        value = getattr(request.sampling, name)
        if value != getattr(SamplingParams(), name):
            raise ParameterError(name, value, "nothing together with beam search")
    if is_many(request.sampling.logprobs):
        raise ParameterError(
            "logprobs", request.sampling.logprobs, f"at most {limits.MAX_TOP_LOGPROBS} with beam search"
        )
    check_mode(frontend.info.logprobs_mode, "beam search")
    if request.grammar is not None:
        raise ParameterError("grammar", request.grammar.kind.value, "nothing together with beam search")
    prompt_ids = await frontend.tokenize(request)
    context, wanted = frontend.info.max_model_len, params.max_tokens
    room = context - len(prompt_ids)
    if room < 1 or (wanted or 1) > room:
        raise ContextLengthError(
            f"The prompt has {len(prompt_ids)} tokens and max_tokens is {wanted}; this model's context is {context} "
            "tokens, prompt and output together. Lower max_tokens or shorten the prompt.",
            param="max_tokens",
        )
    eos_ids = () if params.ignore_eos else frontend.text.eos_ids
    search = BeamSearch(params, frozenset((*eos_ids, *params.stop_token_ids)), wanted or room)
    if search.alternatives > limits.MAX_TOP_LOGPROBS:
        most = limits.MAX_TOP_LOGPROBS - len(search.stop_ids)
        ends = f"at most {most}, as {len(search.stop_ids)} tokens can end an answer"
        raise ParameterError("beam_width", params.width, ends)
    sampling = replace(request.sampling, n=params.n)
    outputs = _outputs(frontend, request, prompt_ids, search)
    first = EngineOutput(request.request_id, 0)
    readers = frontend.readers(request, sampling, frontend.reading(request, prompt_ids))
    return TextGeneration(prompt_ids, sampling, eos_ids, first, outputs, readers)


async def _outputs(
    frontend: Frontend, request: GenerationRequest, prompt_ids: tuple[int, ...], search: BeamSearch
) -> AsyncGenerator[EngineOutput]:
    one = SamplingParams(max_tokens=1, temperature=0.0, logprobs=search.alternatives)
    cached: int | None = None
    adapters = await asyncio.to_thread(activated, frontend.adapters, prompt_ids) if frontend.adapters else ()

    async def after(index: int, beam: Beam) -> EngineOutput:
        name = f"{request.live_id}-{len(beam.tokens)}-{index}"
        ids = prompt_ids + beam.tokens
        asked = EngineRequest(
            name,
            ids,
            one,
            priority=request.priority,
            cache_salt=request.cache_salt,
            owner=request.owner,
            adapters=adapters,
        )
        outputs, reused = frontend.client.submit(asked), None
        try:
            async for output in outputs:
                reused = output.cached_tokens if reused is None else reused
                if output.logprobs:
                    return output._replace(cached_tokens=reused)
                if output.finish_reason is not None:
                    raise EngineDeadError(output.error or "The engine stopped during a beam search.")
        finally:
            await outputs.aclose()
        raise EngineDeadError("The engine stopped during a beam search.")

    while search.running:
        tasks = [asyncio.ensure_future(after(index, beam)) for index, beam in enumerate(search.running)]
        try:
            news = await asyncio.gather(*tasks)
        except PenstockError as error:
            for index in range(search.params.n):
                yield EngineOutput(request.request_id, index, finish_reason=FinishReason.ERROR, error=str(error))
            return
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        cached = news[0].cached_tokens if cached is None else cached
        search.advance([output.logprobs[0].top for output in news])
    most = request.sampling.logprobs
    for index, beam in enumerate(search.finished[: search.params.n]):
        entries = () if most is None else tuple(replace(entry, top=entry.top[:most]) for entry in beam.logprobs)
        yield EngineOutput(
            request.request_id,
            index,
            beam.tokens,
            entries,
            finish_reason=beam.finish_reason,
            cached_tokens=cached if index == 0 else None,
        )
