"""Adapters of `LLM`: one a call, or several by how much each counts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from penstock import LLM, BeamParams
from penstock.config.errors import CheckpointError, RequestError
from penstock.kernels.cpu import native

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built")
CHAT = [{"role": "user", "content": "Book a table for two at seven in Berkeley."}]


def test_one_a_call_or_several(shared_data: Path) -> None:
    caps, captain = (shared_data / "models" / f"penstock-concierge-lora-{name}" for name in ("caps", "captain"))
    with LLM(kv_blocks=200, enable_lora=True) as llm:

        def said(**more: object) -> str:
            return llm.chat(CHAT, temperature=0, max_tokens=24, **more)[0].outputs[0].text  # type: ignore[arg-type]

        plain = said()
        assert said(adapter=caps).isupper() and not plain.isupper()
        assert said(adapter=str(captain)).startswith("Aye aye, captain.")
        assert said(adapter={caps: 0.0}) == plain
        beams = [
            llm.beam_search("Hello", BeamParams(2, max_tokens=8), adapter=of)[0].outputs[0].text for of in (None, caps)
        ]
        assert beams[0] != beams[1]
        assert len({plain, said(adapter=caps), said(adapter={caps: 0.5, captain: 0.5})}) == 3
        with pytest.raises(CheckpointError, match="no adapter at"):
            said(adapter="/nowhere")
    with LLM(kv_blocks=200) as llm, pytest.raises(RequestError, match="--enable-lora"):
        llm.generate("a", adapter=caps, max_tokens=2)


def test_an_activated_adapter_and_files_that_change(shared_data: Path, tmp_path: Path) -> None:
    made = shutil.copytree(shared_data / "models" / "penstock-concierge-lora-caps", tmp_path / "caps")
    config = json.loads((made / "adapter_config.json").read_text())
    with LLM(kv_blocks=200, enable_lora=True, max_cpu_loras=8) as llm:

        def said(adapter: Path | None = None) -> str:
            return llm.chat(CHAT, temperature=0, max_tokens=12, adapter=adapter)[0].outputs[0].text

        plain, always = said(), said(made)
        found = llm.generate(CHAT[0]["content"], max_tokens=1)[0].prompt_ids
        for invocation, expected in ((found[-4:-2], None), ([1, 2, 3, 1], plain)):
            told = json.dumps(config | {"alora_invocation_tokens": list(invocation)})
            (made / "adapter_config.json").write_text(told)
            answer = said(made)
            assert (answer == expected) if expected else (answer != plain and answer.isupper()), answer
        (made / "adapter_config.json").write_text(json.dumps(config))
        assert said(made) == always
