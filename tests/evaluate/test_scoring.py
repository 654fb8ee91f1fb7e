"""Perplexity and importance, against transformers."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from penstock.config.errors import ConfigError
from penstock.config.options import EngineOptions
from penstock.engine.text_pipeline import TextPipeline
from penstock.evaluate.importance import collect_importance
from penstock.evaluate.scoring import Scorer, Window, compare, halved_windows, perplexity, strided_windows
from penstock.weights.imatrix import read_imatrix, write_imatrix
from penstock.weights.writers.quantize import quantize_model


def options(model: Path | str) -> EngineOptions:
    return EngineOptions(model=str(model), dtype="float32")


@pytest.fixture(scope="module")
def stories(shared_data: Path) -> Path:
    return shared_data / "models/stories260K/hf"


@pytest.fixture(scope="module")
def tokens(shared_data: Path, stories: Path) -> list[int]:
    text = (shared_data / "text/grimms.txt").read_text(encoding="utf-8")[:6000]
    return TextPipeline.load(str(stories)).tokenizer.encode(text)


def test_halved_windows() -> None:
    assert halved_windows(range(10), 4) == [Window((0, 1, 2, 3), 3), Window((4, 5, 6, 7), 3)]
    assert halved_windows(range(8), 4, bos=99) == [Window((99, 1, 2, 3), 3), Window((99, 5, 6, 7), 3)]
    with pytest.raises(ConfigError, match="the text has 7 tokens; at least 8 are needed for --context 4"):
        halved_windows(range(7), 4)


@pytest.mark.parametrize(("length", "context", "stride"), [(11, 4, 2), (4, 4, 4), (3, 4, 1), (10, 4, 4), (9, 5, 3)])
def test_strided_windows_score_every_token_once(length: int, context: int, stride: int) -> None:
    text = list(range(100, 100 + length))
    windows = strided_windows(text, context, stride)
    scored = [token for window in windows for token in window.tokens[window.first :]]
    assert scored == text[1:]
    assert all(len(window.tokens) <= context and window.first >= 1 for window in windows)
    assert all(window.first >= context - stride for window in windows[1:])
    with pytest.raises(ConfigError, match="--stride is 9; allowed: 1 to"):
        strided_windows(text, 4, 9)


def test_perplexity_is_that_of_transformers(stories: Path, tokens: list[int]) -> None:
    windows = halved_windows(tokens, 128, 1)[:4]
    model = transformers.AutoModelForCausalLM.from_pretrained(stories, dtype=torch.float32)
    nlls = []
    for window in windows:
        with torch.inference_mode():
            logs = model(torch.tensor([window.tokens])).logits[0].double().log_softmax(-1)
        nlls += [-float(logs[at - 1, window.tokens[at]]) for at in range(window.first, 128)]
    scorer = Scorer(options(stories), 128)
    found = perplexity(scorer, windows)
    scorer.close()
    assert found.tokens == len(nlls) == 4 * 63
    assert found.value == pytest.approx(math.exp(np.mean(nlls)), rel=1e-4)
    assert found.standard_error == pytest.approx(np.std(nlls, ddof=1) / math.sqrt(len(nlls)), rel=1e-3)


def test_q8_0_loses_next_to_nothing_and_a_model_nothing_against_itself(tmp_path: Path, shared_data: Path) -> None:
    """The bundled model on held-out dialogues."""
    lines = (shared_data / "chat/sgd_dev_200.jsonl").read_text(encoding="utf-8")[:20000]
    ids = TextPipeline.load("penstock-concierge").tokenizer.encode(lines)
    windows = halved_windows(ids, 256)[:4]
    quantize_model("penstock-concierge", "q8_0", tmp_path / "q8.gguf")
    one, two, same = (
        Scorer(options(m), 256) for m in (tmp_path / "q8.gguf", "penstock-concierge", "penstock-concierge")
    )
    own, reference, far = compare(one, two, windows)
    assert own.value == pytest.approx(reference.value, rel=0.005)
    assert 0 < far.mean < 0.001
    assert far.median <= far.percentile_99 <= far.maximum
    assert far.same_top > 0.98
    _, _, none = compare(two, same, windows[:1])
    assert (none.mean, none.maximum, none.same_top) == (0.0, 0.0, 1.0)
    for scorer in (one, two, same):
        scorer.close()


def test_models_of_other_vocabularies_are_not_compared(stories: Path) -> None:
    one, two = Scorer(options(stories), 16), Scorer(options("penstock-concierge"), 16)
    with pytest.raises(ConfigError, match="512 and 4096 tokens; only models of one vocabulary"):
        compare(one, two, [Window((1, 2, 3), 1)])
    one.close()
    two.close()


def test_importance_is_the_mean_square_of_every_input(stories: Path, tokens: list[int], tmp_path: Path) -> None:
    windows = halved_windows(tokens, 64, 1)[:3]
    path = tmp_path / "imatrix.gguf"
    write_imatrix(collect_importance(options(stories), windows, path, "grimms.txt"))
    found = read_imatrix(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(stories, dtype=torch.float32)
    sums: dict[str, torch.Tensor] = {}

    def listen(name: str, inputs: torch.Tensor) -> None:
        sums[name] = sums.get(name, torch.zeros(inputs.shape[-1])) + inputs.flatten(0, -2).square().sum(0)

    layer = model.model.layers[2]
    for name, module in (
        ("blk.2.attn_q", layer.self_attn.q_proj),
        ("blk.2.attn_output", layer.self_attn.o_proj),
        ("blk.2.ffn_up", layer.mlp.up_proj),
        ("blk.2.ffn_down", layer.mlp.down_proj),
    ):
        module.register_forward_pre_hook(lambda _, given, name=name: listen(name, given[0]))
    with torch.inference_mode():
        for window in windows:
            model(torch.tensor([window.tokens]))
    assert len(sums) == 4
    for name, wanted in sums.items():
        entry = found.entries[f"{name}.weight"]
        assert entry.counts.tolist() == [192.0]
        assert np.allclose(entry.sums[0], wanted.numpy(), rtol=1e-3, atol=1e-4 * float(wanted.max()))
    assert np.array_equal(found.entries["blk.0.attn_q.weight"].sums, found.entries["blk.0.attn_v.weight"].sums)
    assert (found.chunks, found.chunk_size, found.datasets) == (3, 64, ("grimms.txt",))


def test_importance_of_experts(tmp_path: Path) -> None:
    """Each expert counts its own tokens; together they are top_k times all."""
    from tests.models.tiny import save

    save("mixtral", tmp_path / "m")
    windows = [Window(tuple(np.random.default_rng(0).integers(1, 100, 32).tolist()), 1)]
    found = collect_importance(options(tmp_path / "m"), windows, tmp_path / "i.gguf", "random")
    up, down = found.entries["blk.1.ffn_up_exps.weight"], found.entries["blk.1.ffn_down_exps.weight"]
    assert up.sums.shape == (5, 36) and down.sums.shape == (5, 44)
    assert up.counts.sum() == down.counts.sum() == 2 * 32
    assert np.array_equal(up.counts, down.counts)
    assert np.array_equal(up.sums.any(axis=1), up.counts > 0)
    assert np.array_equal(up.sums, found.entries["blk.1.ffn_gate_exps.weight"].sums)
