"""What a sequence's request is to the sampling kernel."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from penstock.config.samplers import LOOK_BACK
from penstock.config.token_mask import token_mask
from penstock.core.protocol import NewSequence
from penstock.kernels.sampling import RowSettings

_USUAL: Final = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
"""Settings of rows that have no chain: where one runs, they stay neutral."""


def tokens_read(new: NewSequence) -> tuple[int, ...]:
    """The prompt's tokens for what looks back at them: those in whose place rows were given are none."""
    ids, begin = new.prompt_ids, 0
    if not any(span.rows is not None for span in new.media):
        return ids
    read: list[int] = []
    for span in new.media:
        if span.rows is not None:
            read += ids[begin : span.start]
            begin = span.end
    return (*read, *ids[begin:])


def row_settings(new: NewSequence, vocab_size: int) -> RowSettings:
    """The kernel's view of a row. Ids beyond the model's vocabulary are left out: nothing can sample them."""
    params = new.sampling

    def known(tokens: Iterable[int]) -> tuple[int, ...]:
        return tuple(token for token in tokens if 0 <= token < vocab_size)

    chain = params.chain()
    running = {step.name for step in chain or ()}
    usual: dict[str, Any] = {} if chain is not None else {name: float(getattr(params, name)) for name in _USUAL}
    if "top_k" in usual:
        usual["top_k"] = max(params.top_k, 0)
    looks_back = usual.get("repetition_penalty", 1.0) != 1.0 or not running.isdisjoint(LOOK_BACK)
    sequences = params.dry_breaker_sequences if "dry" in running else ()
    return RowSettings(
        vocab_size=vocab_size,
        seed=new.seed & (2**64 - 1),
        sequence=new.sequence,
        min_tokens=params.min_tokens,
        logit_bias=tuple((token, float(bias)) for token, bias in params.logit_bias if token < vocab_size),
        allowed_ids=None if params.allowed_token_ids is None else known(params.allowed_token_ids),
        bad_words=tuple(word for word in params.bad_words_ids if known(word) == word),
        stop_ids=known(new.stop_ids),
        prompt_ids=known(tokens_read(new)) if looks_back else (),
        generated_ids=known(new.generated_ids),
        chain=chain or (),
        breaker_mask=token_mask(known(params.dry_breaker_ids), params.dry_breaker_mask) if "dry" in running else b"",
        breaker_sequences=tuple(ids for ids in sequences if max(ids) < vocab_size),
        protected_ids=known(params.xtc_protected_ids) if "xtc" in running else (),
        state=new.sampler_state,
        **usual,
    )
