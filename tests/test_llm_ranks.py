"""What several processes of one model do besides: adapters and drafts, with the bits of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM
from penstock.completions import Completion
from penstock.kernels.cpu import native

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built")
CHAT = [{"role": "user", "content": "Book a table for two at seven in Berkeley."}]
ASKED: dict[str, Any] = {"temperature": 0.6, "seed": 4, "logprobs": 1, "max_tokens": 24, "ignore_eos": True}


def told(answers: list[Completion]) -> list[Any]:
    outputs = [answer.outputs[0] for answer in answers]
    return [(output.token_ids, [entry.logprob for entry in output.logprobs]) for output in outputs]


def test_adapters_of_several_ranks(shared_data: Path) -> None:
    caps, captain = (shared_data / "models" / f"penstock-concierge-lora-{name}" for name in ("caps", "captain"))
    found = []
    for ranks in (1, 2):
        with LLM(kv_blocks=64, max_num_seqs=4, enable_lora=True, tensor_parallel_size=ranks) as llm:
            uses = (None, caps, captain, {caps: 0.5, captain: 0.5}, caps)
            found.append([told(llm.chat([CHAT, CHAT], adapter=use, **ASKED)) for use in uses])
    assert found[0] == found[1]
    assert len({str(said) for said in found[1]}) == 4


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_drafts_for_several_ranks(method: str, shared_data: Path) -> None:
    model = shared_data / "models" / f"penstock-concierge-{method.removesuffix('_model')}"
    asked = json.dumps({"method": method, "model": str(model), "num_speculative_tokens": 4})
    found, drafts = [], dict[str, int]()
    for ranks in (1, 2):
        drafted = {"speculative_config": asked} if ranks > 1 else {}
        with LLM(kv_blocks=64, max_num_seqs=4, tensor_parallel_size=ranks, **drafted) as llm:  # type: ignore[arg-type]
            found.append([told(llm.chat([CHAT] * 3, **ASKED)), told(llm.chat(CHAT, **ASKED))])
            drafts = dict(llm.stats().draft_decisions)
    assert found[0] == found[1]
    assert drafts["verified"]
