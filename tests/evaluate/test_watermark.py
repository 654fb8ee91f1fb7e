"""Watermarks: found where they are, by the right key alone, and said so by the command."""

from __future__ import annotations

import json
import string

import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.config.samplers import Step
from penstock.engine.text_pipeline import TextPipeline
from penstock.evaluate.watermark import detect
from penstock.kernels.cpu import native
from penstock.kernels.sampling import RowSettings

VOCAB = 1000


def written(delta: float, key: int, count: int, seed: int = 1) -> list[int]:
    """Tokens drawn from an even distribution with a watermark of that strength."""
    kernel = native.NativeSampling()
    row = kernel.row(RowSettings(VOCAB, seed=seed, chain=(Step("watermark", (0.25, delta, float(key))),)))
    logits = np.zeros((1, VOCAB), np.float32)
    return [int(kernel.sample(logits, [row], np.array([position]))[0][0]) for position in range(count)]


def test_marked_texts_are_found_by_their_key() -> None:
    tokens = written(2.0, 7, 300)
    found = detect(tokens, 0.25, 7)
    share = 0.25 * np.exp(2.0) / (0.25 * np.exp(2.0) + 0.75)
    assert found.scored > 290
    assert abs(found.green / found.scored - share) < 0.1
    assert found.z > 10 and found.p < 1e-20
    assert abs(detect(tokens, 0.25, 8).z) < 4
    assert abs(detect(tokens[::-1], 0.25, 7).z) < 4


def test_other_texts_give_what_chance_gives() -> None:
    """z of texts without a watermark is normally distributed."""
    found = [detect(written(0.0, 7, 400, seed), 0.25, 7).z for seed in range(60)]
    assert stats.kstest(found, "norm").pvalue > 1e-4


def test_repeated_pairs_count_once() -> None:
    assert detect([1, 2, 1, 2, 1, 2], 0.5, 3).scored == 2
    assert detect([5], 0.5, 3).scored == 0
    assert detect([], 0.5, 3).z == 0.0


@pytest.mark.parametrize("strength", [0.0, 4.0])
def test_the_command(strength: float) -> None:
    from penstock import LLM

    tokenizer = TextPipeline.load("penstock-concierge").tokenizer
    signs = {sign.encode() for sign in string.ascii_uppercase + string.digits}  # which few longer tokens consist of
    allowed = [token for token in range(tokenizer.vocab_size) if tokenizer.token_bytes(token) in signs]
    with LLM(kv_blocks=64) as llm:
        answers = llm.generate(
            "Hello", max_tokens=400, seed=5, ignore_eos=True, allowed_token_ids=allowed, samplers=["watermark"],
            watermark=True, watermark_delta=strength,
        )  # fmt: skip
    text = answers[0].text
    result = CliRunner().invoke(app, ["detect", "--json"], input=text, catch_exceptions=False)
    said = json.loads(result.stdout)
    assert said["watermark"] is (strength > 0)
    assert said["scored"] >= said["green"] > 0
    words = CliRunner().invoke(app, ["detect"], input=text, catch_exceptions=False).stdout.splitlines()
    assert words[0] == ("watermark" if strength else "no watermark")


def test_short_texts_are_refused() -> None:
    result = CliRunner().invoke(app, ["detect"], input="Hi")
    assert result.exit_code == 1
    assert "Give a longer text." in result.output
