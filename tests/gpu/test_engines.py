"""Whole engines on the GPU: the CPU's greedy tokens, with and without graphs and overlap; the same bits in company."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import run
from benchmarks.gpu.engines import ask
from benchmarks.gpu.shapes import config
from benchmarks.gpu.start import write_weights
from penstock.config.options import EngineOptions
from penstock.config.sampling import SamplingParams
from penstock.core.protocol import TokenLogprobs
from penstock.core.request import EngineRequest
from penstock.engine.build import build_engine
from penstock.engine.loop import Engine
from tests.gpu.sizes import Sizes

MODELS = ("Llama-3.1-8B", "Qwen3-0.6B", "Qwen3-30B-A3B", "DeepSeek-V2-Lite")  # tiny ones of their architectures
LENGTHS = (5, 37, 18, 60)


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


def made(model: str, folder: Path) -> Path:
    """A checkpoint of random weights, the same each time."""
    (folder / "config.json").write_text(json.dumps(config(model, tiny=True, layers=2)))
    torch.manual_seed(3)
    assert write_weights(folder, "cpu")
    return folder


def engine_of(folder: Path, device: str, **more: Any) -> Engine:
    given: dict[str, Any] = {
        "dtype": "float32", "kv_cache_dtype": "float32", "max_num_seqs": 8, "kv_blocks": 200, "pack_cache": "off",
        "max_num_batched_tokens": 64, "enable_prefix_caching": False,
    } | more  # fmt: skip
    return build_engine(EngineOptions(model=str(folder), device=device, **given))[0]


def answers(engine: Engine, lengths: tuple[int, ...], tokens: int) -> list[Answer]:
    """Of all prompts together; steps are recorded as graphs once a request is over."""
    found: dict[str, Answer] = {}
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, logprobs=3)
    for number, length in enumerate(lengths):
        prompt = ask(f"prompt {length}", length, 1, 100).prompt_ids
        engine.add(EngineRequest(str(number), prompt, sampling))
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            answer = found.setdefault(output.request_id, Answer())
            answer.tokens += output.tokens
            answer.logprobs += output.logprobs
    while engine.runner.prepare():
        pass
    return [found[str(number)] for number in range(len(lengths))]


@pytest.mark.parametrize("model", MODELS)
def test_greedy_tokens_are_the_cpus(device: str, sizes: Sizes, model: str, tmp_path: Path) -> None:
    folder = made(model, tmp_path)
    lengths = LENGTHS if device == "cuda" else LENGTHS[:2]
    reference = engine_of(folder, "cpu")
    expected = [answer.tokens for answer in answers(reference, lengths, sizes.steps)]
    reference.close()
    for depth, eager in product((0, 1), (True, False)) if device == "cuda" else ((1, False),):
        engine = engine_of(folder, device, depth=depth, enforce_eager=eager)
        for _ in range(2):  # the second time from graphs, if there are any
            assert [answer.tokens for answer in answers(engine, lengths, sizes.steps)] == expected, (depth, eager)
        engine.close()


@pytest.mark.parametrize("model", MODELS[::2])
@pytest.mark.parametrize("quantize", [None, "fp8", "int4"])
def test_company_changes_no_bit(device: str, sizes: Sizes, model: str, quantize: str | None, tmp_path: Path) -> None:
    folder = made(model, tmp_path)
    name = str(sizes.dtype).removeprefix("torch.")
    options = {"dtype": name, "kv_cache_dtype": name, "quantize": quantize, "batch_invariant": True}
    engine = engine_of(folder, device, **options)
    alone = answers(engine, LENGTHS[:1], sizes.steps)[0]
    assert len(alone.logprobs) == sizes.steps
    for lengths in (LENGTHS, (LENGTHS[0], 3)) if device == "cuda" else ((LENGTHS[0], 3),):
        assert answers(engine, lengths, sizes.steps)[0] == alone
    engine.close()


def test_the_benchmark_runs(device: str, tmp_path: Path) -> None:
    """Quickly, where there is a GPU: some kernels and the smallest model."""
    given = ["--device", device, "--out", str(tmp_path), "--no-compilers"]
    given += (
        ["--quick", "--only", "kernels.attention,kernels.rows,model.qwen3_0_6b"] if device == "cuda" else ["--tiny"]
    )
    if device == "interpreter":
        given += ["--only", "kernels.rows"]
    assert run.main(given) == 0
    assert json.loads((tmp_path / "results.json").read_text())["failures"] == {}
