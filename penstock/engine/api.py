"""What the engine shows to those above it: its client's interface, its facts, and the pieces of an answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from penstock.config.engine_stats import EngineStats
from penstock.config.limits import MAX_TOP_LOGPROBS
from penstock.config.resolve import Decision
from penstock.core.policies.pause import Control
from penstock.core.protocol import TokenLogprobs
from penstock.core.request import EngineOutput, EngineRequest, FinishReason
from penstock.text.parsers.events import ToolCallDelta as ToolCallDelta


class EngineState(str, Enum):
    """Where an engine is in its life.

    RESTARTING: it was ready, and is being started again or gives no sign of life. SLEEPING: it was told to hold nothing
    until it is woken.
    """

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    SLEEPING = "sleeping"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts of a ready engine.

    Attributes:
        model: the name clients use.
        model_path: folder or file it was loaded from (never shown to clients).
        architecture: for example "Qwen3ForCausalLM".
        max_model_len: longest prompt plus output, tokens.
        vocab_size: logits a position.
        block_size, num_blocks: KV cache geometry (num_blocks of the first group).
        max_num_seqs, max_num_batched_tokens: batch limits.
        dtype, device: compute type and device.
        determinism: the level of "same request, same answer" the kernels in use guarantee, in a sentence.
        settings: every derived setting and why.
        memory: where it goes: what, how much, and a remark.
        kernels: per op, the implementation in use and why better ones were refused.
        numbers: what values are kept in: weights and each KV cache type in use.
        parameters: values in all weights; 0 where nobody knows.
        stored: what most of them are stored as: "bf16", "q4_k", "gptq"; "" where nobody knows.
        max_logprobs, logprobs_mode: as in EngineOptions.
        drafts: most of a sequence that a step verifies; 0 where nothing is speculated about.
        logits_processors: names of those that requests may ask for.
        row_width: values of a row that prompts may have in the place of a token; 0 where they may have none.
    """

    model: str
    model_path: str
    architecture: str
    max_model_len: int
    vocab_size: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    dtype: str
    device: str
    determinism: str
    settings: tuple[Decision, ...] = ()
    memory: tuple[Decision, ...] = ()
    kernels: tuple[Decision, ...] = ()
    numbers: str = ""
    parameters: int = 0
    stored: str = ""
    max_logprobs: int = MAX_TOP_LOGPROBS
    logprobs_mode: str = "raw_logprobs"
    drafts: int = 0
    logits_processors: tuple[str, ...] = ()
    row_width: int = 0


class Outputs(Protocol):
    """A request's outputs, an asynchronous iterator for one reader."""

    def __aiter__(self) -> AsyncIterator[EngineOutput]: ...

    async def __anext__(self) -> EngineOutput: ...

    async def aclose(self) -> None:
        """Cancels what still runs; safe to call twice and after the end."""


class EngineClient(Protocol):
    """An engine, wherever it runs (a thread, a process; later a cluster). All methods belong to one event loop."""

    async def start(self) -> EngineInfo:
        """Starts the engine and returns once it can serve.

        Raises:
            PenstockError: it cannot start; the message is the engine's own.
        """

    @property
    def state(self) -> EngineState: ...

    @property
    def info(self) -> EngineInfo:
        """Raises EngineDeadError before the first successful start."""

    def submit(self, request: EngineRequest) -> Outputs:
        """Queues a request; the iterator yields its outputs until every sequence has finished.

        The first output may be empty: it says that the engine admitted the request.
        Closing the iterator early (aclose) cancels the request. If the engine dies, each unfinished sequence yields an
        output with finish_reason ERROR. A refusal at admission is raised from the first iteration.

        Raises:
            RequestError: refused at admission.
            OverloadedError: queue limits are reached.
            EngineDeadError: no engine is there.
        """

    def arriving(self, owner: str) -> AbstractContextManager[None]:
        """Held while the requests of a call of this owner are made and submitted: they count as waiting meanwhile.

        Raises:
            OverloadedError: more seconds of work wait already than may, a fair share of them this owner's.
        """

    def check_room(self, owner: str) -> None:
        """Raises OverloadedError as `arriving`, for calls that submit at once."""

    def cancel(self, request_id: str) -> None:
        """Cancels a request: its sequences end as CANCELLED within one step. Unknown ids are ignored."""

    def end_reasoning(self, request_id: str) -> None:
        """Ends the reasoning of a request that has a budget of it: the marks of its end come next, then the answer.

        A token or two may come before. Nothing changes where the reasoning is over; unknown ids are ignored.
        """

    def control(self, control: Control) -> None:
        """Pauses the engine, has it go on, or forgets its cached prefixes. One that is started anew is not paused."""

    async def stats(self) -> EngineStats:
        """The newest snapshot; while no engine is there nothing runs in it, and counters never fall."""

    async def close(self) -> None:
        """Ends the engine and frees everything it held."""


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of one sequence's answer, in text: of its reasoning, then of its content, then of its calls.

    Attributes:
        index: the sequence (OpenAI's choice index).
        text: new text; held back while it might be the start of a stop string or half a character.
        token_ids: the tokens accounted for since the last delta (their text may still be held back).
        logprobs: one entry a token where asked.
        prompt_logprobs: on the first delta of sequence 0 where asked: entries of prompt positions 1 … n - 1.
        finish_reason: set on the sequence's last delta.
        stop_reason: the stop string or stop token id that ended it, None for end-of-sequence or length.
        error: a sentence for the client when finish_reason is ERROR.
        reasoning: new text of the reasoning, where the request is parsed.
        tool_calls: pieces of tool calls, where the request is parsed.
        reasoning_tokens: how many of `token_ids` belong to the reasoning, where the request is parsed.
    """

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    reasoning_tokens: int = 0
