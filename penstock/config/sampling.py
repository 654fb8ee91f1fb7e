"""Sampling parameters: what a request may ask of the sampler, checked once when they are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from penstock.config import limits
from penstock.config.errors import ParameterError
from penstock.config.logits_processors import ProcessorCall, as_calls
from penstock.config.samplers import (
    SamplerParams,
    as_tuple,
    check_banned,
    check_integer,
    check_number,
    check_switches,
    check_texts,
    check_token_ids,
)

_SEVERAL = ("stop", "bad_words", "stop_token_ids", "bad_words_ids", "logit_bias", "banned_strings", "stop_regex",
            "logprob_token_ids", "negative_prompt_ids")  # fmt: skip


def stream_key(*parts: object) -> int:
    """A 64-bit key of random streams: a hash of the parts, so that neighbouring seeds give unrelated streams."""
    text = "\0".join(map(str, parts)).encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True)
class SamplingParams(SamplerParams):
    """How tokens are chosen and when a request ends. Defaults sample from the unmodified distribution.

    logit_bias, allowed_token_ids, the grammar, bad_words and min_tokens come first, then the chain of samplers
    (`SamplerParams`), then the draw. Log-probabilities (`LogprobParams`) are those of the model before all of them,
    unless the engine's logprobs_mode says otherwise.

    Fields of several values take lists too, or None for no value; `stop` also takes one string, `logit_bias` a mapping.
    All become tuples.

    Attributes:
        n: independent continuations of one prompt; they share its KV cache.
        max_tokens: most tokens to generate; None means up to the context length.
        min_tokens: end-of-sequence, stop tokens and stop strings are ignored before this many tokens.
        logit_bias: (token id, bias) pairs added to the logits; -100 or less bans nothing by itself but comes close.
        allowed_token_ids: if given, every other token is impossible.
        bad_words: strings that must not be generated; the frontend turns them into bad_words_ids.
        bad_words_ids: token sequences whose last token is banned after the others were generated.
        stop: strings that end the output (not included unless include_stop_str_in_output).
        stop_token_ids: token ids that end the output besides the model's own end-of-sequence ids.
        ignore_eos: go on past the model's end-of-sequence ids.
        seed: start of the random stream; None lets the engine derive one from its own seed and the request.
        skip_special_tokens: leave special tokens out of the text.
        banned_strings: texts that never appear in the answer, whatever their case: it is taken back to before one that
            has appeared, and goes on with another token there.
        guidance_scale: 1 leaves the distribution as it is; else a second sequence reads the negative prompt, and what
            is drawn is the negative prompt's logits and so many times what the prompt's have more (classifier-free
            guidance, Sanchez et al. 2023, 2306.17806).
        negative_prompt: its text, as it is; None for the shortest there is.
        negative_prompt_ids: the same in tokens; the frontend fills them in.
        token_healing: the prompt's last token is drawn anew, as the beginning of the answer's first token, so that a
            prompt may end in the middle of a word.
        begins_with: bytes with which the first token begins, which are the prompt's; the frontend fills them in.
        stop_regex: patterns at which the output ends as at `stop`; their syntax is that of `text.stop_patterns`.
        num_speculative_tokens: most tokens that are proposed for a step to verify, 0 for none; None for as many as the
            engine proposes. It changes no answer.
        logits_processors: those of the engine's that change the model's logits before all of this, in their order:
            names, or objects with `name`, `args` and `kwargs`.

    Raises:
        ParameterError: a value is outside its documented range.
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    skip_special_tokens: bool = True
    banned_strings: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    num_speculative_tokens: int | None = None
    guidance_scale: float = 1.0
    negative_prompt: str | None = None
    negative_prompt_ids: tuple[int, ...] = ()
    token_healing: bool = False
    begins_with: bytes = b""
    logits_processors: tuple[ProcessorCall, ...] = ()

    def __post_init__(self) -> None:
        self._take_lists()
        check_switches(self, "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "token_healing")
        self._check_lengths()
        self.check_samplers()
        self._check_tokens()
        check_texts("stop", self.stop, limits.MAX_STOP_STRINGS)
        check_texts("bad_words", self.bad_words, limits.MAX_BAD_WORDS)
        check_texts("stop_regex", self.stop_regex, limits.MAX_STOP_REGEXES, limits.MAX_STOP_REGEX_CHARS)
        check_banned(self.banned_strings)
        check_number("guidance_scale", self.guidance_scale, *limits.GUIDANCE_SCALES)
        if self.negative_prompt is not None and not isinstance(self.negative_prompt, str):
            raise ParameterError("negative_prompt", self.negative_prompt, "a text")
        self._check_beginning()

    def _take_lists(self) -> None:
        """Turns what people write for a field of several values into the tuple it is."""
        for name in _SEVERAL:
            value: Any = getattr(self, name)
            if name in ("stop", "banned_strings", "stop_regex") and isinstance(value, str):
                value = (value,)
            if name == "logit_bias" and isinstance(value, Mapping):
                value = sorted(value.items(), key=str)  # pairs in one order, whatever their types
            several = as_tuple(name, value)
            if name in ("logit_bias", "bad_words_ids"):
                several = tuple(as_tuple(name, item) for item in several)
            object.__setattr__(self, name, several)
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", as_tuple("allowed_token_ids", self.allowed_token_ids))
        object.__setattr__(self, "logits_processors", as_calls(self.logits_processors))

    def _check_beginning(self) -> None:
        try:
            if not isinstance(self.begins_with, bytes):
                raise ValueError
            self.begins_with.decode()
        except ValueError as error:
            raise ParameterError("begins_with", self.begins_with, "the bytes of a text in UTF-8") from error

    def _check_lengths(self) -> None:
        check_integer("n", self.n, 1, limits.MAX_N)
        if self.max_tokens is not None:
            check_integer("max_tokens", self.max_tokens, 1, limits.MAX_TOKENS)
        for name in ("min_tokens", "prompt_logprobs_start"):
            check_integer(name, getattr(self, name), 0, limits.MAX_TOKENS)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ParameterError("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        if self.num_speculative_tokens is not None:
            check_integer("num_speculative_tokens", self.num_speculative_tokens, 0, limits.MAX_TOKENS)
        if self.seed is not None:
            check_integer("seed", self.seed, limits.MIN_SEED, limits.MAX_SEED)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                check_integer(name, value, -1, limits.MAX_VOCABULARY)
        self.check_named()

    def _check_tokens(self) -> None:
        if any(len(pair) != 2 for pair in self.logit_bias):
            raise ParameterError("logit_bias", self.logit_bias, "a mapping, or pairs of a token id and a bias")
        check_token_ids("logit_bias", tuple(token for token, _ in self.logit_bias), limits.MAX_LOGIT_BIAS)
        for _, bias in self.logit_bias:
            check_number("logit_bias", bias, -limits.MAX_BIAS, limits.MAX_BIAS)
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise ParameterError("allowed_token_ids", [], "at least one token id, or leave the field out")
            check_token_ids("allowed_token_ids", self.allowed_token_ids, limits.MAX_ALLOWED_TOKEN_IDS)
        check_token_ids("logprob_token_ids", self.logprob_token_ids, limits.MAX_LOGPROB_TOKEN_IDS)
        check_token_ids("negative_prompt_ids", self.negative_prompt_ids, limits.MAX_TOKENS)
        check_token_ids("stop_token_ids", self.stop_token_ids, limits.MAX_STOP_TOKEN_IDS)
        if sum(map(len, self.bad_words_ids)) > limits.MAX_BAD_WORD_TOKENS:
            raise ParameterError("bad_words", "too long", f"at most {limits.MAX_BAD_WORD_TOKENS} tokens in all")
        for sequence in self.bad_words_ids:
            if not sequence:
                raise ParameterError("bad_words", "", "non-empty words")
            check_token_ids("bad_words", sequence, limits.MAX_BAD_WORD_TOKENS)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0
