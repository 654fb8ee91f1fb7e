"""Pairs of texts that are scored by a model that ranks, or by how near their embeddings are, over an engine."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace

from penstock.config import limits
from penstock.config.errors import ParameterError
from penstock.config.generation import GenerationRequest
from penstock.engine.frontend import Frontend
from penstock.engine.pooling import Pooled, pool_all
from penstock.text.pairs import PairCut, encode_cut_pair


async def score_pairs(
    frontend: Frontend,
    pairs: Sequence[tuple[str, str]],
    make: Callable[[str | Sequence[int]], GenerationRequest],
    field: str,
    instruction: str | None = None,
    cut: PairCut | None = None,
    use_activation: bool = True,
) -> list[Pooled]:
    """Scores pairs of a query and a document: what a ranking model gives, else the cosine of their embeddings.

    Args:
        frontend: of the model.
        pairs: the texts.
        make: makes a request of a text or token ids.
        field: stands for the documents in messages.
        instruction: what a model that takes one is told to look for.
        cut: how texts are cut that are too long; None to refuse them.
        use_activation: scores are what the model's last function makes of its logits; else they are these.

    Returns:
        One a pair; its last value is the score.

    Raises:
        RequestError: the model cannot score, or a text is refused.
    """
    pooling, tokenizer = frontend.text.pooling, frontend.text.tokenizer
    if len(instruction or "") * len(pairs) > limits.MAX_PROMPT_CHARS:
        told = f"at most {limits.MAX_PROMPT_CHARS // len(pairs)} with {len(pairs)} pairs; send fewer of them"
        raise ParameterError("instruction", f"{len(instruction or '')} characters", told)
    cut = cut or PairCut()
    if (params := pooling.ranking()) is None:
        if cut != PairCut():
            pairs = await asyncio.to_thread(lambda: [cut.texts(tokenizer, *pair) for pair in pairs])
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        unit = [pooling.embedding(normalize=True)] * len(texts)
        found = dict(
            zip(texts, await pool_all(frontend, list(map(make, pooling.prompted(texts))), unit, field), strict=True)
        )
        return [_compared(found[query], found[document]) for query, document in pairs]
    shape = pooling.pair_prompt
    encoded = [
        await asyncio.to_thread(encode_cut_pair, tokenizer, query, document, shape, instruction, cut)
        for query, document in pairs
    ]
    params = params if use_activation else replace(params, activation="")
    each = [replace(params, second=second) for _, second in encoded]
    return await pool_all(frontend, [make(ids) for ids, _ in encoded], each, field)


def _compared(one: Pooled, other: Pooled) -> Pooled:
    cosine = sum(a * b for a, b in zip(one.values, other.values, strict=True))
    tokens, cached = one.prompt_tokens + other.prompt_tokens, one.cached_tokens + other.cached_tokens
    return Pooled(array("f", [cosine]), tokens, cached)
