"""The tables of losses: the file written for llama-perplexity, the reading of its figures, and one small run."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.cpu import loss
from penstock.evaluate.scoring import Window

PRINTED = """
Mean PPL(Q)                   :  61.104000 ±   1.200000
Mean PPL(base)                :  61.213300 ±   1.200000
Mean PPL(Q)/PPL(base)         :   0.998214 ±   0.000530
Mean    KLD:   0.000289 ±   0.000010
Same top p: 98.630 ± 0.257 %
"""


def decoded(rows: np.ndarray, vocab: int) -> np.ndarray:
    """Log-probabilities of rows as llama-perplexity reads them."""
    heads = np.ascontiguousarray(rows[:, :4]).view(np.float32)
    return np.asarray(heads[:, :1] * rows[:, 4 : 4 + vocab] + heads[:, 1:])


def test_log_rows_hold_the_log_probabilities() -> None:
    logits = np.random.default_rng(0).normal(0, 3, (5, 33)).astype(np.float32)
    logits[0, :2] = (30, -30)
    logits[1] = 1.5  # no spread
    rows = loss.log_rows(logits)
    assert rows.shape == (5, 4 + 34) and rows.dtype == np.uint16
    wanted = torch.from_numpy(logits).double().log_softmax(-1).numpy()
    spread = logits.max(1, keepdims=True) - logits.min(1, keepdims=True)
    assert (np.abs(decoded(rows, 33) - wanted) < spread / 65535 + 1e-5).all()


def test_the_base_file_has_its_header_tokens_and_rows() -> None:
    windows = [Window((1, 2, 3, 4), 3), Window((1, 6, 7, 8), 3)]
    kept = loss.Recorded(5, {w: [(torch.eye(5)[i : i + 1], torch.tensor([4]))] for i, w in enumerate(windows)})
    file = io.BytesIO()
    loss.write_base(file, loss.Subject("m", "m", 4, windows, ()), kept)
    content = file.getvalue()
    assert content[:8] == b"_logits_"
    assert np.frombuffer(content, np.int32, 11, 8).tolist() == [4, 5, 2, 1, 2, 3, 4, 1, 6, 7, 8]
    rows = np.frombuffer(content, np.uint16, offset=8 + 44).reshape(2, 10)  # a scored token a window
    assert decoded(rows, 5).argmax(1).tolist() == [0, 1]


def test_llama_figures_are_read_or_what_it_said_is_kept() -> None:
    row = {"model": "m", "format": "q6_k", "exact": 61.2133, "penstock": 61.2115}
    row |= {"penstock_divergence": 0.000074, "penstock_error": 0.0002}
    found = loss.read_llama(PRINTED)
    assert found == {"llama": 61.104, "llama_error": 0.00053, "llama_divergence": 0.000289, "llama_same_top": 0.9863}
    assert loss.llama_cells(row | found) == (
        *("m", "q6_k", "61.2133", "-0.003 ± 0.020", "-0.179 ± 0.053", "+0.176", "0.074", "0.289", "Penstock"),
    )
    assert loss.read_llama("failed to load") == {"llama_failed": "failed to load"}
    assert "failed" in loss.llama_cells(row | {"llama_failed": "failed to load"})


def test_a_log_that_ends_early_is_asked_for_again(tmp_path: Path) -> None:
    seen, printed = tmp_path / "seen", tmp_path / "printed"
    printed.write_text(PRINTED)
    script = f"test -e {seen} && cat {printed}; echo . >> {seen}"
    assert loss.run_llama(["sh", "-c", script]) == loss.read_llama(PRINTED)
    assert seen.read_text() == ".\n.\n"
    assert loss.run_llama(["sh", "-c", "echo no model; exit 1"]) == {"llama_failed": "no model"}


def test_losses_of_the_story_model(shared_data: Path, tmp_path: Path) -> None:
    concierge, stories = loss.subjects(shared_data, 1)
    assert [len(s.windows) for s in (concierge, stories)] == [1, 2]
    assert "q4_k_m" in concierge.formats and not {"q4_k_m", "iq4_xs", "tq1_0"} & set(stories.formats)
    original = loss.record(stories, stories.model)
    fine, beside = loss.weight_loss(stories, "q8_0", original, None, tmp_path)
    coarse, _ = loss.weight_loss(stories, "q4_0", original, None, tmp_path)
    assert beside is None and fine["tokens"] == 2 * 255
    assert 8.5 < fine["bits"] < 11 and coarse["bits"] < fine["bits"]
    assert 0 < fine["divergence"]["mean"] < 0.01 < coarse["divergence"]["mean"] < 1
    assert fine["arithmetic"]["divergence"]["mean"] <= fine["divergence"]["mean"]
    assert fine["ratio"] == pytest.approx(1, abs=0.01)
    whole, halves = (loss.kv_loss(stories, kind, original) for kind in ("float32", "float16"))
    assert abs(whole["divergence"]["mean"]) < 1e-5 < 1e-3 > halves["divergence"]["mean"]
    assert whole["finer_layers"] == 0
    assert len(loss.weight_cells(fine)) == len(loss.WEIGHT_COLUMNS)
    assert len(loss.kv_cells(whole)) == len(loss.KV_COLUMNS)
