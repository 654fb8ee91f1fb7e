"""What several processes of one model do besides: adapters and drafts, with the bits of one process."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from penstock import LLM
from penstock.completions import Completion
from penstock.config.adapters import AdapterUse
from penstock.config.errors import RequestError
from penstock.config.options import EngineOptions
from penstock.config.sampling import SamplingParams
from penstock.core.request import EngineRequest
from penstock.engine.build import build_engine
from penstock.engine.loop import Engine
from penstock.kernels.cpu import native
from penstock.runtime.pipeline.lead import StagedSteps
from penstock.runtime.runner import ModelRunner
from penstock.weights.adapters.open import adapter_digest

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built")
CHAT = [{"role": "user", "content": "Book a table for two at seven in Berkeley."}]
ASKED: dict[str, Any] = {"temperature": 0.6, "seed": 4, "logprobs": 1, "max_tokens": 24, "ignore_eos": True}


def told(answers: list[Completion]) -> list[Any]:
    outputs = [answer.outputs[0] for answer in answers]
    return [(output.token_ids, [entry.logprob for entry in output.logprobs]) for output in outputs]


@pytest.mark.parametrize("degree", [(2, 1), (1, 2), pytest.param((2, 2), marks=pytest.mark.slow)])
def test_adapters_of_several_ranks(degree: tuple[int, int], shared_data: Path) -> None:
    caps, captain = (shared_data / "models" / f"penstock-concierge-lora-{name}" for name in ("caps", "captain"))
    found = []
    for ranks, stages in ((1, 1), degree):
        sizes = {"tensor_parallel_size": ranks, "pipeline_parallel_size": stages}
        with LLM(kv_blocks=64, max_num_seqs=4, enable_lora=True, **sizes) as llm:  # type: ignore[arg-type]
            uses = (None, caps, captain, {caps: 0.5, captain: 0.5}, caps)
            found.append([told(llm.chat([CHAT, CHAT], adapter=use, **ASKED)) for use in uses])
    assert found[0] == found[1]
    assert len({str(said) for said in found[1]}) == 4


@pytest.mark.parametrize("method", ["draft_model", "eagle3", "self"])
def test_drafts_for_several_ranks(method: str, shared_data: Path) -> None:
    model = shared_data / "models" / f"penstock-concierge-{method.removesuffix('_model')}"
    named = {"layers": 5} if method == "self" else {"model": str(model)}
    asked = json.dumps({"method": method, **named, "num_speculative_tokens": 4})
    found, drafts = [], dict[str, int]()
    for ranks in (1, 2):
        drafted = {"speculative_config": asked} if ranks > 1 else {}
        with LLM(kv_blocks=64, max_num_seqs=4, tensor_parallel_size=ranks, **drafted) as llm:  # type: ignore[arg-type]
            found.append([told(llm.chat([CHAT] * 3, **ASKED)), told(llm.chat(CHAT, **ASKED))])
            drafts = dict(llm.stats().draft_decisions)
    assert found[0] == found[1]
    assert drafts["verified"]


def test_stages_refuse_an_adapter_that_is_damaged_where_others_have_it(shared_data: Path, tmp_path: Path) -> None:
    """The one that leads looks at all of it; whoever computes beside it is not disturbed."""
    caps = shared_data / "models" / "penstock-concierge-lora-caps"
    made = shutil.copytree(caps, tmp_path / "caps")
    tensors = load_file(made / "adapter_model.safetensors")
    tensors[max(tensors)][:] = float("nan")  # of the last layer
    save_file(tensors, made / "adapter_model.safetensors")
    with LLM(kv_blocks=64, max_num_seqs=4, enable_lora=True, pipeline_parallel_size=2) as llm:
        with pytest.raises(RequestError, match="no finite numbers"):
            llm.chat(CHAT, adapter=made, **ASKED)
        assert told(llm.chat([CHAT], adapter=caps, **ASKED))


def test_what_a_stage_cannot_place_ends_those_who_compute_with_it(shared_data: Path) -> None:
    """A file that only another process cannot read: others go on, and it is placed once it can be read."""
    caps = shared_data / "models" / "penstock-concierge-lora-caps"
    greedy = {**ASKED, "temperature": 0.0}
    with LLM(kv_blocks=64, max_num_seqs=4, enable_lora=True) as llm:
        answers = [llm.chat([CHAT], adapter=use, **greedy) for use in (None, caps)]
    plain, changed = map(told, answers)
    prompt = tuple(answers[0][0].prompt_ids)
    options = EngineOptions(
        kv_blocks=64, max_num_seqs=4, enable_lora=True, pipeline_parallel_size=2, device="cpu", threads=2
    )
    engine, _ = build_engine(options)
    with closing(engine):
        runner = engine.runner
        assert isinstance(runner, ModelRunner) and isinstance(runner._stages, StagedSteps)
        stages = runner._stages
        place, use = stages.place, AdapterUse(adapter_digest(str(caps)), str(caps))
        how = SamplingParams(**greedy)
        stages.read = lambda uses: None  # type: ignore[method-assign]
        stages.place = lambda slot, use: place(slot, replace(use, path="/nowhere"))  # type: ignore[method-assign]
        said = finished(engine, EngineRequest("lost", prompt, how, adapters=(use,)))
        assert said[1] and "failed while computing" in said[1]
        assert finished(engine, EngineRequest("plain", prompt, how)) == (list(plain[0][0]), None)
        stages.place = place  # type: ignore[method-assign]
        again = EngineRequest("again", prompt, how, adapters=(use,))
        assert finished(engine, again) == (list(changed[0][0]), None)


def finished(engine: Engine, request: EngineRequest) -> tuple[list[int], str | None]:
    """The tokens of an answer, and the error that ended it."""
    engine.add(request)
    tokens: list[int] = []
    error = None
    while engine.has_work:
        for waited, refused in engine.adapters.ready():
            assert refused is None
            engine.add(waited)
        for output in engine.step():
            tokens += output.tokens
            error = output.error or error
    return tokens, error
