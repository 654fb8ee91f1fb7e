"""Architectures that are asked for and do not run, and why: each is refused by name, before anything is loaded."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

_OWN_STATE: Final = "its layers keep a state for which there are no layers here"
_SPARSE: Final = "its sparse attention chooses positions by an indexer, for which there is no cache here"
_NO_LAYERS: Final = "there are no layers for it here, and it masks or orders its inputs in its own way"

NOT_RUN: Final = MappingProxyType(
    {
        "BailingMoeV2_5ForCausalLM": _OWN_STATE,
        "BailingHybridForCausalLM": _OWN_STATE,
        "CodeGenForCausalLM": _NO_LAYERS,
        "DeepseekV32ForCausalLM": _SPARSE,
        "DeepseekV4ForCausalLM": _SPARSE,
        "KimiLinearForCausalLM": _OWN_STATE,
        "RecurrentGemmaForCausalLM": _OWN_STATE,
        "RwkvForCausalLM": _OWN_STATE,
        "RWKV5ForCausalLM": _OWN_STATE,
        "Rwkv6ForCausalLM": _OWN_STATE,
        "RWKV7ForCausalLM": _OWN_STATE,
        "xLSTMForCausalLM": _OWN_STATE,
        "ZambaForCausalLM": _OWN_STATE,
        "Zamba2ForCausalLM": _OWN_STATE,
    }
)
