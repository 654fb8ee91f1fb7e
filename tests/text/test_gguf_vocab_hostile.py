"""Hostile GGUF metadata is a CheckpointError that names the field, never a crash."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config.errors import CheckpointError
from penstock.text.tokenizer import Tokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
TOKENS = ["<unk>", "<s>", "</s>", *BYTES, "▁", "a", "b", "ab", "▁ab"]
TYPES = [2, 3, 3, *[6] * 256, 1, 1, 1, 1, 1]
SPM: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.scores": [-float(i) for i in range(len(TOKENS))],
    "tokenizer.ggml.token_type": TYPES,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}
BPE: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["a", "b", "Ġ", "ab", "<end>"],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.token_type": [1, 1, 1, 1, 3],
    "tokenizer.ggml.eos_token_id": 4,
}


def test_the_unspoiled_metadata_works() -> None:
    assert Tokenizer.from_gguf(SPM).encode("abab") == [1, 263, 262]
    bpe = Tokenizer.from_gguf(BPE)
    assert bpe.encode("ab ab<end>") == [3, 2, 3, 4]
    assert (bpe.eos_id, bpe.end_ids, bpe.special_ids) == (4, frozenset({4}), frozenset({4}))
    arrays = {**SPM, "tokenizer.ggml.scores": np.array(SPM["tokenizer.ggml.scores"], dtype=np.float32)}
    assert Tokenizer.from_gguf(arrays).encode("abab") == [1, 263, 262]


HOSTILE: list[tuple[dict[str, Any], str, Any]] = [
    (SPM, "model", None),
    (SPM, "model", "rwkv"),
    (SPM, "model", 7),
    (SPM, "tokens", None),
    (SPM, "tokens", []),
    (SPM, "tokens", "abc"),
    (SPM, "tokens", 5),
    (SPM, "tokens", [*TOKENS[:-1], "ab"]),
    (SPM, "tokens", [*TOKENS[:-1], ""]),
    (SPM, "tokens", [*TOKENS[:-1], b"\xff\xfe"]),
    (SPM, "tokens", [*TOKENS[:-1], "\udcff"]),
    (SPM, "tokens", [*TOKENS[:-1], 3]),
    (SPM, "tokens", [*TOKENS[:3], "<0x-1>", *TOKENS[4:]]),
    (SPM, "tokens", [*TOKENS[:3], "<0x100>", *TOKENS[4:]]),
    (SPM, "scores", None),
    (SPM, "scores", [0.0]),
    (SPM, "scores", [float("nan")] * len(TOKENS)),
    (SPM, "scores", ["x"] * len(TOKENS)),
    (SPM, "token_type", TYPES[:-1]),
    (SPM, "token_type", [*TYPES[:-1], 99]),
    (SPM, "token_type", [*TYPES[:-1], 1.5]),
    (SPM, "bos_token_id", len(TOKENS)),
    (SPM, "bos_token_id", -1),
    (SPM, "eos_token_id", "2"),
    (SPM, "eos_token_id", float("inf")),
    (SPM, "unknown_token_id", [0]),
    (SPM, "add_bos_token", "yes"),
    (BPE, "merges", None),
    (BPE, "merges", ["ab"]),
    (BPE, "merges", [" b"]),
    (BPE, "merges", ["a "]),
    (BPE, "merges", ["a c"]),
    (BPE, "merges", ["b a"]),
    (BPE, "merges", [b"\xff a"]),
    (BPE, "pre", "no-such"),
    (BPE, "pre", ["gpt-2"]),
]


@pytest.mark.parametrize(("base", "name", "value"), HOSTILE)
def test_hostile_metadata_is_refused_by_name(base: dict[str, Any], name: str, value: Any) -> None:
    spoiled = {**base, f"tokenizer.ggml.{name}": value}
    with pytest.raises(CheckpointError, match=rf"tokenizer\.ggml\.{name}") as caught:
        Tokenizer.from_gguf(spoiled)
    assert len(str(caught.value)) < 700


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.binary(max_size=8),
    st.lists(st.one_of(st.integers(-5, 300), st.floats(), st.text(max_size=4), st.binary(max_size=4)), max_size=6),
    st.just([0] * len(TOKENS)),
    st.just([4] * len(TOKENS)),
)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_random_metadata_never_crashes(data: st.DataObject) -> None:
    base = data.draw(st.sampled_from([SPM, BPE]))
    names = data.draw(st.lists(st.sampled_from(sorted({*SPM, *BPE})), min_size=1, max_size=3, unique=True))
    spoiled = {**base, **{name: data.draw(VALUES) for name in names}}
    with suppress(CheckpointError):
        built = Tokenizer.from_gguf(spoiled)
        built.decode(built.encode("ab ab é <end></s>"))
