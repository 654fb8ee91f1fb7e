"""Prompts for filling in the middle, over real vocabularies."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.config.errors import RequestError
from penstock.text.infill import InfillText, InfillTokens, infill_ids
from penstock.text.tokenizer import Tokenizer

Named = Callable[[str], Tokenizer]
TEXT = InfillText("def f(x):\n    ", "\n    return y", "y =", [("a.py", "import b")])


def test_tokens_are_found_by_their_names(tokenizer: Named) -> None:
    starcoder = InfillTokens.of(tokenizer("starcoder"))
    assert starcoder == InfillTokens(prefix=1, suffix=3, middle=2, pad=4)
    assert starcoder.ends == (4,)
    assert InfillTokens.of(tokenizer("deepseek-coder")).missing == []
    assert InfillTokens.of(tokenizer("llama-spm")).missing == ["prefix", "suffix", "middle"]


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("starcoder", "{}<fim_prefix>def f(x):\n    y =<fim_suffix>\n    return y<fim_middle>"),
        (
            "deepseek-coder",
            "{}<｜begin▁of▁sentence｜><｜fim▁begin｜>def f(x):\n    y =<｜fim▁hole｜>\n    return y<｜fim▁end｜>",
        ),
    ],
)
def test_the_layout(tokenizer: Named, name: str, written: str) -> None:
    """What is begun stands behind the prefix, and other files before all, as llama-server has it."""
    chosen = tokenizer(name)
    ids = infill_ids(chosen, InfillTokens.of(chosen), TEXT, 200)
    other = "\n\n--- snippet ---\n\nimport b"
    assert chosen.decode(ids, skip_special_tokens=False) == written.format(other)


def test_files_have_names_where_the_model_knows_them(tokenizer: Named) -> None:
    chosen = tokenizer("starcoder")
    tokens = InfillTokens(prefix=1, suffix=3, middle=2, repository=5, file=6)
    ids = infill_ids(chosen, tokens, TEXT, 200)
    plain = [chosen.decode([token]) if token > 6 else f"<{token}>" for token in ids]
    assert "".join(plain).startswith("<5>myproject\n<6>a.py\nimport b<6>filename\n<1>def f")


def test_what_control_tokens_are_called_is_text(tokenizer: Named) -> None:
    chosen = tokenizer("starcoder")
    ids = infill_ids(chosen, InfillTokens.of(chosen), InfillText("<fim_middle>", "<fim_suffix>"), 200)
    assert [token for token in ids if token in (1, 2, 3)] == [1, 3, 2]


@pytest.mark.parametrize("room", range(6, 60, 3))
def test_what_is_farthest_from_the_place_is_cut_first(tokenizer: Named, room: int) -> None:
    chosen = tokenizer("starcoder")
    tokens = InfillTokens.of(chosen)
    before, behind = "a b c d e f g h i j k l m n o p", "q r s t u v w x y z"
    ids = infill_ids(chosen, tokens, InfillText(before, behind, "", [("x", "1 2 3 4 5 6 7 8")]), room)
    assert len(ids) <= room
    at, between = ids.index(1), ids.index(3)
    told = chosen.decode(ids[at + 1 : between])
    assert before.endswith(told)
    assert behind.startswith(chosen.decode(ids[between + 1 : -1]))
    if at:  # files come in when all of the others is there
        assert told == before


def test_what_is_begun_must_have_room(tokenizer: Named) -> None:
    chosen = tokenizer("starcoder")
    with pytest.raises(RequestError, match="longer than the context"):
        infill_ids(chosen, InfillTokens.of(chosen), InfillText("", "", "a b c d e f g h"), 6)
