"""Layers for multi-token prediction, in the layouts in which families publish them, draft what plain torch says."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from penstock.config.errors import ConfigError
from penstock.config.options import EngineOptions
from penstock.config.sampling import SamplingParams
from penstock.core.request import EngineRequest
from penstock.engine.build import build_engine
from penstock.engine.loop import Engine
from penstock.weights.draft_heads import head_files
from penstock.weights.open import open_checkpoint
from tests.engine.test_drafts import run
from tests.models import tiny
from tests.runtime.drafters.test_heads import watched

HIDDEN, DRAFTS = int(tiny.SIZES["hidden_size"]), 3


@dataclass(frozen=True)
class Layout:
    """How a family publishes its layer.

    Attributes:
        family: as in tests.models.tiny.
        method: a name that vLLM has for it.
        names: of the projection, the norms of embedding and hidden state, the last norm, and the layer.
        layer: fields of a model whose one layer is of the right kind.
        config: what the files' configuration says besides.
        hidden_first, after_norm: as in MtpLayout.
        tables: names of the embedding and the logits' matrix, where the files have them once more.
        copied: whether those are the target's.
        around_one: norms have their distance from one.
    """

    family: str
    method: str
    names: tuple[str, str, str, str, str]
    layer: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    hidden_first: bool = False
    after_norm: bool = False
    tables: tuple[str, str] | None = None
    copied: bool = True
    around_one: bool = False


def _after_the_last(layers: int) -> dict[str, Any]:
    begin = f"model.layers.{layers}."
    names = tuple(f"{begin}{name}" for name in ("eh_proj", "enorm", "hnorm", "shared_head.norm", ""))
    tables = f"{begin}embed_tokens.weight", f"{begin}shared_head.head.weight"
    return {"names": names, "tables": tables, "config": {"num_nextn_predict_layers": 1}}


_MTP = ("mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm", "mtp.layers.0.")
_MIMO = tuple(
    f"model.mtp_layers.0.{name}"
    for name in ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm", "")
)
_ERNIE = (
    "model.mtp_linear_proj.0", "model.mtp_emb_norm.0", "model.mtp_hidden_norm.0", "", "model.mtp_block.0.",
)  # fmt: skip
_DELTA = {"layer_types": ["full_attention"], "mlp_only_layers": []}
LAYOUTS = {
    "deepseek-v3": Layout("deepseek-v3", "deepseek_mtp", layer={"first_k_dense_replace": 0}, **_after_the_last(3)),
    "glm4-moe": Layout(
        "glm4-moe", "glm4_moe_mtp", layer={"first_k_dense_replace": 0}, copied=False, **_after_the_last(3)
    ),
    "mimo": Layout(
        "qwen2", "mimo_mtp", _MIMO, hidden_first=True, after_norm=True,
        config={"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1},
    ),
    "ernie4_5-moe": Layout(
        "ernie4_5-moe", "ernie_mtp", _ERNIE, {"moe_layer_start_index": 1}, {"num_nextn_predict_layers": 1}
    ),
    "qwen3-next": Layout("qwen3-next", "qwen3_next_mtp", _MTP, _DELTA, after_norm=True, around_one=True),
    "qwen3_5": Layout(
        "qwen3_5", "mtp", _MTP, {"layer_types": ["full_attention"]}, {"mtp_num_hidden_layers": 1}, after_norm=True,
        around_one=True,
    ),
    "qwen3_5-moe": Layout(
        "qwen3_5-moe", "mtp", _MTP, _DELTA, {"mtp_num_hidden_layers": 1}, after_norm=True, around_one=True
    ),
}  # fmt: skip


@dataclass
class Reference:
    """A target and its layer, both computed by transformers; the layer over all positions again for each draft."""

    layout: Layout
    target: Any
    layer: Any
    fc: Tensor
    norms: tuple[nn.Module, nn.Module]
    logits: Tensor

    @torch.no_grad()
    def drafts(self, tokens: Sequence[int]) -> list[int]:
        """What follows these."""
        ids, drafts = torch.tensor(tokens), list[int]()
        given = self.target.model(ids[None, :-1]).last_hidden_state[0]
        for _ in range(DRAFTS):
            behind = torch.cat((ids[1:], torch.tensor(drafts, dtype=torch.long)))
            parts = [self.norms[0](self.layer.model.embed_tokens(behind)), self.norms[1](given)]
            parts = parts[::-1] if self.layout.hidden_first else parts
            plain, normed = self._over(torch.cat(parts, 1) @ self.fc.T)
            drafts.append(int((normed[-1] @ self.logits.T).argmax()))
            given = torch.cat((given, normed[-1:] if self.layout.after_norm else plain[-1:]))
        return drafts

    def _over(self, entries: Tensor) -> tuple[Tensor, Tensor]:
        """What the layer makes of these, before and behind the last norm."""
        seen: list[Tensor] = []
        watch = self.layer.model.layers[0].register_forward_hook(
            lambda module, arguments, result: seen.append(result[0] if isinstance(result, tuple) else result)
        )
        normed = self.layer.model(inputs_embeds=entries[None]).last_hidden_state[0]
        watch.remove()
        return seen[0].reshape(-1, HIDDEN), normed


def publish(layout: Layout, folder: Path) -> Reference:
    """A target with such a layer, as its authors publish it."""
    target = tiny.save(layout.family, folder)
    layer = tiny.make(layout.family, num_hidden_layers=1, **layout.layer)
    torch.manual_seed(31)
    drawn = [0.3 * torch.randn(HIDDEN) + (0.0 if layout.around_one else 1.0) for _ in range(3)]
    fc = torch.randn(HIDDEN, 2 * HIDDEN) / HIDDEN**0.5
    make = type(layer.model.norm)
    norms = make(HIDDEN, eps=1e-6), make(HIDDEN, eps=1e-6)
    eps = getattr(layer.model.norm, "variance_epsilon", getattr(layer.model.norm, "eps", None))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
        for norm, weight in zip(norms, drawn, strict=False):
            norm.weight.copy_(weight)
            for name in ("variance_epsilon", "eps"):
                if hasattr(norm, name):
                    setattr(norm, name, eps)
        if layout.tables is None or layout.copied:
            layer.model.embed_tokens.weight.copy_(target.model.embed_tokens.weight)
            layer.lm_head.weight.copy_(target.lm_head.weight)
        if layout.names[3]:
            layer.model.norm.weight.copy_(drawn[2])
        else:
            layer.model.norm.weight.copy_(target.model.norm.weight)
    _write(layout, folder, layer, fc, norms)
    return Reference(layout, target, layer, fc, norms, layer.lm_head.weight)


def _write(layout: Layout, folder: Path, layer: Any, fc: Tensor, norms: Sequence[Any]) -> None:
    layer.save_pretrained(folder / "layer")
    own = load_file(folder / "layer" / "model.safetensors")
    begin, (projection, embedding, hidden, last, block) = "model.layers.0.", layout.names
    tensors = load_file(folder / "model.safetensors")
    tensors |= {block + name.removeprefix(begin): one for name, one in own.items() if name.startswith(begin)}
    tensors |= {f"{projection}.weight": fc}
    tensors |= {f"{name}.weight": norm.weight.detach() for name, norm in zip((embedding, hidden), norms, strict=True)}
    if last:
        tensors[f"{last}.weight"] = own["model.norm.weight"]
    if layout.tables is not None:
        tensors[layout.tables[0]] = own["model.embed_tokens.weight"]
        tensors[layout.tables[1]] = own["lm_head.weight"]
    save_file(
        {name: one.contiguous().clone() for name, one in tensors.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, **layout.config}), encoding="utf-8")


def made(folder: Path, method: str | None, **more: Any) -> Engine:
    """An engine of a target, and of what drafts for it by this method; None for nothing."""
    said = {"method": method, "num_speculative_tokens": DRAFTS, "adaptive": False, **more}
    options: dict[str, Any] = {
        "dtype": "float32", "kv_cache_dtype": "float32", "threads": 1, "max_num_seqs": 4, "max_model_len": 64,
        "block_size": 4, "kv_blocks": 60, "isa": "generic",
    }  # fmt: skip
    config = None if method is None else json.dumps(said)
    return build_engine(EngineOptions(str(folder), speculative_config=config, **options))[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_it_drafts_what_plain_torch_says(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    reference = publish(layout, tmp_path)
    compare(tmp_path, reference.drafts, layout.method)


def compare(folder: Path, drafts: Callable[[Sequence[int]], list[int]], method: str, **more: Any) -> None:
    """All that is drafted behind answers is what `drafts` says, and the answers are those without."""
    requests = [
        EngineRequest(f"r{one}", tuple(range(3 + one, 14 + 3 * one)), SamplingParams(temperature=0.0, max_tokens=12))
        for one in range(3)
    ]
    plain = made(folder, None)
    truth = run(plain, *requests)
    plain.close()
    engine = made(folder, method, **more)
    watch = watched(engine, told=False)
    answers = run(engine, *(replace(one, speculate=DRAFTS) for one in requests))
    assert {key: one.tokens for key, one in answers.items()} == {key: one.tokens for key, one in truth.items()}
    assert engine.stats().drafter_failures == 0
    engine.close()
    for request in requests:
        tokens = [*request.prompt_ids, *truth[request.request_id, 0].tokens]
        for known in range(len(request.prompt_ids) + 1, len(tokens)):
            made_here = watch.made[request.request_id, known]
            assert list(made_here) == drafts(tokens[:known])[:DRAFTS], (request.request_id, known)
    assert len(watch.made) >= 30


def test_a_copy_without_the_layer_is_told_of(tmp_path: Path) -> None:
    """Configurations say that there is one where files have it no more."""
    tiny.save("qwen3_5", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**config, "mtp_num_hidden_layers": 1}), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"no layer for multi-token prediction: its files have none of .* mtp\.fc"):
        made(tmp_path, "mtp")


@pytest.mark.parametrize("name", ["deepseek-v3", "glm4-moe"])
def test_tables_that_are_the_targets_are_read_once(name: str, tmp_path: Path) -> None:
    publish(LAYOUTS[name], tmp_path)
    files = head_files(open_checkpoint(tmp_path), "mtp")
    assert ("embed_tokens.weight" in files.tensors, "lm_head.weight" in files.tensors) == (name != "deepseek-v3",) * 2
