"""A running answer in text: tokens of every sequence are detokenised, searched for stop strings, cut and told apart."""

from __future__ import annotations

from collections import deque

from penstock.config.sampling import SamplingParams
from penstock.core.protocol import TokenLogprobs
from penstock.core.request import EngineOutput, FinishReason
from penstock.engine.api import Delta, Outputs
from penstock.text.loops import REPEATED, Loop
from penstock.text.parsers.events import Parsed
from penstock.text.parsers.reading import AnswerReader


class TextGeneration:
    """Deltas of all sequences of one request, in order of arrival: iterate it.

    A stop string ends its sequence here; the engine is told once no sequence is left.

    Attributes:
        prompt_ids: the prompt in tokens.
        cached_tokens: prompt tokens that came from the prefix cache (0 until the first delta).
        missed: why no more did, "" if all did or nothing was said yet.
        queue_seconds: time from arrival in the engine to admission (None until the first delta).
        drafts: by sequence, how many of its drafts were verified so far, and how many of those were right.
    """

    def __init__(
        self,
        prompt_ids: tuple[int, ...],
        sampling: SamplingParams,
        eos_ids: tuple[int, ...],
        first: EngineOutput,
        outputs: Outputs,
        readers: dict[int, AnswerReader],
        loops: dict[int, Loop] | None = None,
    ) -> None:
        """`first` was taken from `outputs` already; `eos_ids` are those in force (none with ignore_eos).

        `readers` turn the sequences' tokens into text; `loops` say where they repeat themselves too often.
        """
        self.prompt_ids = prompt_ids
        self.cached_tokens = 0
        self.missed = ""
        self.queue_seconds: float | None = None
        self.drafts: dict[int, tuple[int, int]] = {}
        self._sampling = sampling
        self._eos_ids = eos_ids
        self._first: EngineOutput | None = first
        self._outputs = outputs
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._sequences = readers
        self._loops = loops or {}
        self._ready: deque[Delta] = deque()

    def __aiter__(self) -> TextGeneration:
        return self

    async def __anext__(self) -> Delta:
        while self._sequences or self._ready:
            if self._ready:
                return self._ready.popleft()
            if self._first is not None:
                output, self._first = self._first, None
            else:
                output = await anext(self._outputs)
            self._absorb(output)
            if not self._sequences:
                await self._outputs.aclose()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Cancels what still runs; safe to call twice and after the end."""
        self._sequences.clear()
        self._ready.clear()
        await self._outputs.aclose()

    def _absorb(self, output: EngineOutput) -> None:
        """Makes its deltas: more than one where what it brings has another order than a delta is told in."""
        if output.cached_tokens is not None and output.sequence == 0:  # the others share what the first computes
            self.cached_tokens, self.queue_seconds = output.cached_tokens, output.queue_seconds
            self.missed = output.missed
        self.drafts[output.sequence] = output.drafts
        self._prompt_logprobs.extend(output.prompt_logprobs)
        reader = self._sequences.get(output.sequence)
        if reader is None or not (output.tokens or output.finish_reason):
            return
        finish, error = output.finish_reason, output.error
        stop_reason: str | int | None = None
        shown = used = len(output.tokens)
        if finish is FinishReason.STOP and output.tokens:
            shown -= not self._sampling.include_stop_str_in_output
            stop_reason = None if output.tokens[-1] in self._eos_ids else output.tokens[-1]
        if (loop := self._loops.get(output.sequence)) is not None and (end := loop.end(output.tokens[:shown])):
            shown = used = end
            finish, stop_reason = FinishReason.STOP, REPEATED
            error = None
        part = reader.push(output.tokens[:shown], finish is not None, finish is FinishReason.LENGTH)
        if part.stopped is not None:
            used = part.tokens_used
            finish = FinishReason.STOP
            stop_reason = part.stopped
            error = None
        if finish is not None:
            del self._sequences[output.sequence]
        prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        if output.sequence == 0:
            prompt_logprobs, self._prompt_logprobs = tuple(self._prompt_logprobs), []
        *before, last = part.told or (Parsed(part.text),)
        for news in before:
            self._ready.append(Delta(output.sequence, news.text, reasoning=news.reasoning, tool_calls=news.tool_calls))
        tokens, logprobs = output.tokens[:used], output.logprobs[:used]
        delta = Delta(
            output.sequence,
            last.text,
            tokens,
            logprobs,
            prompt_logprobs,
            finish,
            stop_reason,
            error,
            last.reasoning,
            last.tool_calls,
            part.reasoning_tokens,
        )
        self._ready.append(delta)
