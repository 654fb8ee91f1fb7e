"""What samplers are told in texts, in tokens: banned words, DRY's sequence breakers, line breaks, negative prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate

from penstock.config import limits
from penstock.config.errors import ParameterError
from penstock.config.sampling import SamplingParams
from penstock.config.token_mask import token_mask
from penstock.text.spellings import Spellings
from penstock.text.tokenizer import Tokenizer


class SampledTexts:
    """Fills in the tokens of texts. Safe to share among threads."""

    def __init__(self, tokenizer: Tokenizer, eos_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._eos_ids = tuple(eos_ids)
        self._spellings = Spellings(tokenizer)

    def is_little(self, sampling: SamplingParams, most: int) -> bool:
        """Whether all texts together have no more than so many characters, and need no search of the vocabulary."""
        if sampling.dry_multiplier or sampling.xtc_probability:
            return False
        texts = sum(map(len, sampling.bad_words)) + len(sampling.negative_prompt or "")
        return not (texts or sampling.guidance_scale != 1) or (texts <= most and self._tokenizer.prepared)

    def in_tokens(self, sampling: SamplingParams) -> SamplingParams:
        """The parameters with the tokens of all texts but the negative prompt.

        Raises:
            ParameterError: a text has half a surrogate pair, or words have too many tokens.
        """
        sampling = self._for_chain(sampling)
        if not sampling.bad_words:
            return sampling
        words = dict.fromkeys((*sampling.bad_words_ids, *self._words(sampling.bad_words)))
        return replace(sampling, bad_words_ids=tuple(words))

    def negative(
        self, sampling: SamplingParams, prompt_ids: Sequence[int], check_length: Callable[[str, int], None]
    ) -> SamplingParams:
        """The parameters with the tokens of the negative prompt, of a request that is guided.

        Without one it is what the tokenizer begins every text with, or else, as in transformers, the prompt's last
        token.

        Args:
            check_length: told the field and the characters of a text before it is tokenised; raises for too many.

        Raises:
            ParameterError: it has half a surrogate pair.
        """
        if sampling.guidance_scale == 1:
            return replace(sampling, negative_prompt_ids=())
        if sampling.negative_prompt_ids:
            return sampling
        text = sampling.negative_prompt or ""
        check_length("negative_prompt", len(text))
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ParameterError(
                "negative_prompt", "half a surrogate pair", "a text without lone surrogates"
            ) from error
        ids = tuple(self._tokenizer.encode(text)) or tuple(prompt_ids[-1:])
        return replace(sampling, negative_prompt_ids=ids)

    def _for_chain(self, sampling: SamplingParams) -> SamplingParams:
        """Fills in the tokens of DRY's sequence breakers, and of line breaks and ends for XTC."""
        running = {step.name for step in sampling.chain() or ()}
        if "xtc" in running and not sampling.xtc_protected_ids:
            line = self._tokenizer.encode("\n", add_special_tokens=False)[-1:]
            sampling = replace(sampling, xtc_protected_ids=tuple(dict.fromkeys((*self._eos_ids, *line))))
        if "dry" not in running:
            return sampling
        try:
            found = [self._spellings.find(text) for text in sampling.dry_sequence_breakers]
        except UnicodeEncodeError as error:
            allowed = "texts without lone surrogates"
            raise ParameterError("dry_sequence_breakers", "half a surrogate pair", allowed) from error
        sequences = dict.fromkeys((*sampling.dry_breaker_sequences, *(ids for one in found for ids in one.sequences)))
        sizes = accumulate(map(len, sequences))
        held = sum(size <= limits.MAX_BREAKER_TOKENS for size in sizes)
        return replace(
            sampling,
            dry_breaker_ids=(),
            dry_breaker_mask=token_mask(
                sampling.dry_breaker_ids, sampling.dry_breaker_mask, *(one.mask for one in found)
            ),
            dry_breaker_sequences=tuple(sequences)[: min(held, limits.MAX_BREAKER_SEQUENCES)],
        )

    def _words(self, words: Sequence[str]) -> Iterable[tuple[int, ...]]:
        """The tokens of words at the start of a text and after a space, no more of them than are allowed in all."""
        count, most = 0, limits.MAX_BAD_WORD_TOKENS
        for text in dict.fromkeys(text for word in words for text in (word, " " + word.lstrip())):
            ids = tuple(self._tokenizer.encode(text, add_special_tokens=False))
            count += len(ids)
            if count > most:
                raise ParameterError("bad_words", f"{len(words)} words", f"at most {most} tokens in all")
            if ids:
                yield ids
