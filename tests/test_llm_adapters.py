"""Adapters of `LLM`: one a call, or several by how much each counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock import LLM
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
        assert len({plain, said(adapter=caps), said(adapter={caps: 0.5, captain: 0.5})}) == 3
        with pytest.raises(CheckpointError, match="no adapter at"):
            said(adapter="/nowhere")
    with LLM(kv_blocks=200) as llm, pytest.raises(RequestError, match="--enable-lora"):
        llm.generate("a", adapter=caps, max_tokens=2)
