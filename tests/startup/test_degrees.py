"""Ten kinds of models at every pair of degrees: tokens and log-probabilities are those of one process, bit by bit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models

from penstock import LLM
from penstock.kernels.cpu import native
from tests.layers.test_sharding import BLOCKS, LATENT, SIZES
from tests.models import encoders, tiny
from tests.startup.degrees import CHOICES, MOST_RANKS, Case, Traits, covering
from tests.weights.test_quantised_folders import FOLDERS, encode_by_method, encode_gptq, quantise

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built")
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 40}


def family(name: str, **sizes: Any) -> Callable[[Path], object]:
    return lambda folder: tiny.save(name, folder, **sizes)


def gptq(folder: Path) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
    quantise(folder, config, functools.partial(encode_gptq, ordered=True), num_hidden_layers=3)


def fp8(folder: Path) -> None:
    config, make = FOLDERS["fp8"]
    quantise(folder, config, encode_by_method(config, make), num_hidden_layers=3)


MODELS: dict[str, tuple[Callable[[Path], object], dict[str, Any]]] = {  # how each is made, and loaded
    "dense": (family("llama-biases", **SIZES), {}),
    "experts": (family("qwen3-moe", **SIZES, **EXPERTS), {}),
    "latent": (family("deepseek-v3", **LATENT, max_position_embeddings=1024), {"max_model_len": 700}),
    "sliding": (family("gemma3", **{**SIZES, "tie_word_embeddings": True}), {}),
    "recurrent": (family("mamba"), {}),
    "hybrid": (family("qwen3-next", **SIZES), {}),
    "encoder": (lambda folder: encoders.save("bert", folder), {"max_num_batched_tokens": 64}),
    "q4_k": (family("qwen3", **{**BLOCKS, "num_hidden_layers": 3}), {"quantize": "q4_k_s"}),
    "gptq": (gptq, {}),
    "fp8": (fp8, {}),
}
TRAITS = {name: Traits(name in ("experts", "latent"), name == "latent") for name in MODELS}
CASES = covering(TRAITS)
FAST = {("hybrid", "tp2-pp1-dp2"), ("latent", "tp3-pp1-ep-dp2-cp3"), ("q4_k", "tp4-pp2")}
PROMPTS = [tiny.prompt(length, seed=length) for length in (1, 7, 23, 40)]
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "threads": 1,
    "max_model_len": 64,
    "kv_blocks": 128,
    "max_num_batched_tokens": 32,  # prompts are cut
}


def answers(folder: Path, **more: Any) -> Any:
    settings = {**SETTINGS, **more}
    longest = [tiny.prompt(settings["max_model_len"] - 100)] if settings["max_model_len"] > 256 else []
    prompts = [*PROMPTS, *longest]  # contexts are shared by runs of 256 positions
    with LLM(str(folder), **settings) as llm:
        if "Bert" in llm.info.architecture:
            return llm.embed(prompts)
        found = llm.generate(prompts, temperature=0.8, seed=3, max_tokens=6, ignore_eos=True, logprobs=3)
        return [(one.token_ids, one.logprobs) for completion in found for one in completion.outputs]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """The folder of a model, and what one process says."""
    made: dict[str, tuple[Path, Any]] = {}

    def of(model: str) -> tuple[Path, Any]:
        if model not in made:
            folder = tmp_path_factory.mktemp(model)
            MODELS[model][0](folder)
            words = models.WordLevel({f"w{number}": number for number in range(32)}, "w0")
            tokenizers.Tokenizer(words).save(str(folder / "tokenizer.json"))
            made[model] = folder, answers(folder, **MODELS[model][1])
        return made[model]

    return of


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=f"{case.model}-{case.degrees}",
            marks=[] if (case.model, str(case.degrees)) in FAST else pytest.mark.slow,
        )
        for case in CASES
    ],
)
def test_answers_are_those_of_one_process(case: Case, alone: Callable[[str], tuple[Path, Any]]) -> None:
    folder, expected = alone(case.model)
    degrees = case.degrees
    more = {"enable_expert_parallel": True, "enable_eplb": True, "eplb_step_interval": 2} if degrees.ep else {}
    found = answers(
        folder,
        tensor_parallel_size=degrees.tp,
        pipeline_parallel_size=degrees.pp,
        data_parallel_size=degrees.dp,
        decode_context_parallel_size=degrees.cp,
        **more,
        **MODELS[case.model][1],
    )
    assert found == expected


def test_every_pair_is_among_the_cases() -> None:
    """Where it can be: of models with each degree, and of degrees with each other."""
    for model in MODELS:
        for tp in CHOICES["tp"]:
            assert any(case.model == model and case.degrees.tp == tp for case in CASES)
        for pp in CHOICES["pp"]:
            assert any(case.model == model and case.degrees.pp == pp for case in CASES)
    assert {(case.degrees.tp, case.degrees.pp) for case in CASES} >= {
        (tp, pp) for tp in CHOICES["tp"] for pp in CHOICES["pp"] if 1 < tp * pp <= MOST_RANKS
    }
    assert {case.model for case in CASES if case.degrees.ep} == {name for name, has in TRAITS.items() if has.experts}
    assert {case.model for case in CASES if case.degrees.cp > 1} == {"latent"}
    assert {case.model for case in CASES if case.degrees.dp > 1} == set(MODELS)
