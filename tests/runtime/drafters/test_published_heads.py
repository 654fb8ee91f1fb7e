"""EAGLE heads, MLP speculators and recurrent drafters, as published, draft what plain torch says."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from penstock.config.errors import ConfigError
from tests.models import tiny
from tests.models.tiny_heads import HEADS, HIDDEN, KEYS, LAYER, SIZE, VOCAB
from tests.runtime.drafters.test_mtp_layouts import DRAFTS, compare, made

INNER = 20
NORMS = ("embedding_layernorm.weight", "hidden_states_layernorm.weight")


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape) / shape[-1] ** 0.5


def rms(x: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def rotated(x: Tensor) -> Tensor:
    """x [T, heads, SIZE] at positions 0, 1, …"""
    angles = torch.arange(len(x))[:, None] * 10000.0 ** -(torch.arange(0, SIZE, 2) / SIZE)
    cos, sin = (torch.cat((part, part), 1)[:, None] for part in (angles.cos(), angles.sin()))
    half = SIZE // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def layer(x: Tensor, t: dict[str, Tensor], begin: str) -> Tensor:
    """A Llama layer over x [T, HIDDEN], without a first norm unless there is one."""
    first = t.get(f"{begin}input_layernorm.weight")
    normed = x if first is None else rms(x, first)

    def heads(name: str, count: int) -> Tensor:
        bias = t.get(f"{begin}self_attn.{name}.bias")
        return functional.linear(normed, t[f"{begin}self_attn.{name}.weight"], bias).reshape(len(x), count, SIZE)

    query, key = rotated(heads("q_proj", HEADS)), rotated(heads("k_proj", KEYS))
    key, value = (one.repeat_interleave(HEADS // KEYS, 1) for one in (key, heads("v_proj", KEYS)))
    mixed = functional.scaled_dot_product_attention(
        *(one.transpose(0, 1) for one in (query, key, value)), is_causal=True
    )
    x = x + mixed.transpose(0, 1).reshape(len(x), -1) @ t[f"{begin}self_attn.o_proj.weight"].T
    normed = rms(x, t[f"{begin}post_attention_layernorm.weight"])
    gate, up = (normed @ t[f"{begin}mlp.{name}.weight"].T for name in ("gate_proj", "up_proj"))
    return x + (functional.silu(gate) * up) @ t[f"{begin}mlp.down_proj.weight"].T


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")


def states(target: Any, tokens: Sequence[int]) -> Tensor:
    """The target's last states of all tokens but the last [n, HIDDEN]."""
    with torch.no_grad():
        found: Tensor = target.model(torch.tensor(tokens)[None, :-1]).last_hidden_state[0]
    return found


EAGLES: dict[str, dict[str, Any]] = {
    "llama": {"named": "LlamaForCausalLM", "begin": ""},  # as its authors have it
    "biases": {"named": "EagleLlamaForCausalLM", "begin": "model.", "bias": True, "head": True, "layers": 2},
    "hass": {"named": "LlamaForCausalLMEagle", "begin": "", "normed": True, "first": True},
}


@pytest.mark.parametrize("name", EAGLES)
def test_eagle(name: str, tmp_path: Path) -> None:
    case = EAGLES[name]
    target = tiny.save("llama", tmp_path / "target")
    torch.manual_seed(5)
    tensors = {"fc.weight": drawn(HIDDEN, 2 * HIDDEN)}
    for index in range(case.get("layers", 1)):
        for key, shape in LAYER.items():
            if key != "input_layernorm.weight" or index or case.get("first"):
                tensors[f"layers.{index}.{key}"] = drawn(*shape) if len(shape) > 1 else 1.0 + 0.3 * torch.randn(shape)
    if case.get("bias"):
        tensors |= {"fc.bias": torch.randn(HIDDEN)}
        tensors |= {f"layers.0.self_attn.{key}.bias": torch.randn(KEYS * SIZE) for key in ("k_proj", "v_proj")}
        tensors["layers.0.self_attn.q_proj.bias"] = torch.randn(HEADS * SIZE)
    if case.get("normed"):
        tensors |= {
            f"{key}_layernorm.weight": 1.0 + 0.3 * torch.randn(HIDDEN) for key in ("embedding", "hidden_states")
        }
    logits = drawn(VOCAB, HIDDEN) if case.get("head") else target.lm_head.weight.detach()
    config = {
        **tiny.SIZES, "architectures": [case["named"]], "model_type": "llama", "hidden_act": "silu",
        "num_hidden_layers": case.get("layers", 1), "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    }  # fmt: skip
    stored = {case["begin"] + key: one for key, one in tensors.items()}
    write(tmp_path / "head", config, {**stored, **({"lm_head.weight": logits} if case.get("head") else {})})
    table = target.model.embed_tokens.weight.detach()

    def drafts(tokens: Sequence[int]) -> list[int]:
        given, found = states(target, tokens), list[int]()
        for _ in range(DRAFTS):
            parts = [table[[*tokens[1:], *found]], given]
            if case.get("normed"):
                parts = [
                    rms(parts[0], tensors["embedding_layernorm.weight"]),
                    rms(given, tensors["hidden_states_layernorm.weight"]),
                ]
            x = functional.linear(torch.cat(parts, 1), tensors["fc.weight"], tensors.get("fc.bias"))
            for index in range(case.get("layers", 1)):
                x = layer(x, tensors, f"layers.{index}.")
            found.append(int((logits @ x[-1]).argmax()))
            given = torch.cat((given, x[-1:]))
        return found

    compare(tmp_path / "target", drafts, "eagle", model=str(tmp_path / "head"))


@pytest.mark.parametrize(("tied", "scaled", "stored"), [(False, False, 0), (True, True, 0), (True, False, 1)])
def test_mlp_speculator(tied: bool, scaled: bool, stored: int, tmp_path: Path) -> None:
    """`stored`: of tied tensors the file has one, which may be any."""
    target = tiny.save("llama", tmp_path / "target")
    torch.manual_seed(6)
    stages = 1 if tied else DRAFTS
    emb, head, bias = ([drawn(*shape) for _ in range(stages)] for shape in ((VOCAB, INNER), (VOCAB, INNER), (1, INNER)))
    ln = [1.0 + 0.3 * torch.randn(INNER) for _ in range(stages)]
    proj = [drawn(INNER, INNER if number else HIDDEN) for number in range(2 if tied else stages)]
    tensors: dict[str, Tensor] = {}
    for number in range(stages):
        tensors[f"speculator.emb.{number + stored}.weight"] = emb[number]
        tensors[f"speculator.head.{number}.weight" if not tied else f"speculator.head.{stored}.weight"] = head[number]
        tensors[f"speculator.ln.{number + stored}.weight"] = ln[number]
        tensors[f"speculator.ln.{number + stored}.bias"] = bias[number][0]
    for number, one in enumerate(proj):
        tensors[f"speculator.proj.{number + (stored if number else 0)}.weight"] = one
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator", "emb_dim": HIDDEN,
        "inner_dim": INNER, "n_predict": DRAFTS, "vocab_size": VOCAB, "tie_weights": tied, "scale_input": scaled,
    }  # fmt: skip
    write(tmp_path / "head", config, tensors)
    weight = 0.5 ** (0.5 / DRAFTS)
    factor = math.sqrt((1 - weight**2) * INNER / 2) / weight

    def drafts(tokens: Sequence[int]) -> list[int]:
        state, found = states(target, tokens)[-1], [tokens[-1]]
        state = rms(state) / math.sqrt(2.0) if scaled else state
        for number in range(DRAFTS):
            own, move = (0, min(number, 1)) if tied else (number, number)
            mixed = proj[move] @ state + factor * emb[own][found[-1]]
            state = functional.gelu(rms(mixed, ln[own]) + bias[own][0])
            found.append(int((head[own] @ state).argmax()))
        return found[1:]

    compare(tmp_path / "target", drafts, "mlp_speculator", model=str(tmp_path / "head"))


@pytest.mark.parametrize(("recurrent", "exit_size"), [(True, 2 * HIDDEN), (False, 30)])
def test_recurrent_drafter(recurrent: bool, exit_size: int, tmp_path: Path) -> None:
    target = tiny.save("llama", tmp_path / "target")
    torch.manual_seed(7)
    tensors = {"lm_head.2.weight": drawn(VOCAB, exit_size)}
    for number in range(2):
        tensors[f"lm_head.{number}.linear.weight"] = drawn(exit_size, exit_size)
        tensors[f"lm_head.{number}.linear.bias"] = torch.randn(exit_size)
    if exit_size != 2 * HIDDEN:
        tensors |= {"input_proj.weight": drawn(exit_size, 2 * HIDDEN), "input_proj.bias": torch.randn(exit_size)}
    if recurrent:
        tensors |= {"rnn_u.weight": drawn(HIDDEN, HIDDEN), "rnn_u.bias": torch.randn(HIDDEN)}
        tensors["rnn_w.weight"] = drawn(HIDDEN, HIDDEN)
    config = {
        "architectures": ["Drafter"], "model_type": "recurrent_drafting_drafter", "vocab_size": VOCAB,
        "hidden_size": HIDDEN, "exit_dim": exit_size, "num_draft_layers": 2, "rnn": recurrent,
    }  # fmt: skip
    write(tmp_path / "head", config, tensors)
    table = target.model.embed_tokens.weight.detach()

    def drafts(tokens: Sequence[int]) -> list[int]:
        context, state, found = states(target, tokens)[-1], torch.zeros(HIDDEN), [tokens[-1]]
        for _ in range(DRAFTS):
            read = table[found[-1]]
            if recurrent:
                moved = functional.linear(state, tensors["rnn_u.weight"], tensors["rnn_u.bias"])
                state = functional.silu(tensors["rnn_w.weight"] @ read + moved)
            else:
                state = read + state
            x = torch.cat((context, state))
            if "input_proj.weight" in tensors:
                x = functional.linear(x, tensors["input_proj.weight"], tensors["input_proj.bias"])
            for number in range(2):
                name = f"lm_head.{number}.linear"
                x = x + functional.silu(functional.linear(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"]))
            found.append(int((tensors["lm_head.2.weight"] @ x).argmax()))
        return found[1:]

    compare(tmp_path / "target", drafts, "redrafter", model=str(tmp_path / "head"))


def _eagle(config: dict[str, Any]) -> None:
    config |= {**tiny.SIZES, "hidden_size": 48, "architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1}


def _mlp(config: dict[str, Any]) -> None:
    config |= {"model_type": "mlp_speculator", "emb_dim": HIDDEN, "n_predict": 99, "vocab_size": VOCAB}


def _recurrent(config: dict[str, Any]) -> None:
    config |= {"model_type": "recurrent_drafting_drafter", "hidden_size": HIDDEN, "vocab_size": 9, "exit_dim": 8}
    config |= {"num_draft_layers": 1}


@pytest.mark.parametrize(
    ("fill", "method", "told"),
    [
        (_eagle, "eagle", "hidden states of 48 elements"),
        (_mlp, "mlp_speculator", r"99 stages \(n_predict\); allowed: 32"),
        (_recurrent, "redrafter", "guesses 9 tokens"),
        (_mlp, "eagle", "is a head for method mlp_speculator, and method eagle was asked for"),
    ],
)
def test_what_does_not_fit_is_told(
    fill: Callable[[dict[str, Any]], None], method: str, told: str, tmp_path: Path
) -> None:
    tiny.save("llama", tmp_path / "target")
    config: dict[str, Any] = {}
    fill(config)
    write(tmp_path / "head", config, {"fc.weight": torch.ones(2)})
    with pytest.raises(ConfigError, match=told):
        made(tmp_path / "target", method, model=str(tmp_path / "head"))
