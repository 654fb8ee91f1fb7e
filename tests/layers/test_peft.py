"""Adapters that PEFT made, and its own logits of them: transformers with peft in float32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config.adapters import AdapterUse, activated
from penstock.config.errors import CheckpointError
from penstock.kernels.cpu import native
from penstock.layers.adapters import add_adapters
from penstock.layers.batch import Batch
from penstock.runtime.adapter_loading import AdapterLoader
from penstock.weights.adapters.open import adapter_digest, read_adapter
from penstock.weights.loader import StoredMatrices
from penstock.weights.open import open_checkpoint
from penstock.weights.weight_plan import LoadTarget, plan_weights
from tests.layers.test_adapter_files import Adapted
from tests.models import tiny
from tests.models.harness import load

peft = pytest.importorskip("peft", reason="peft is not installed")
pytestmark = [
    pytest.mark.skipif(not native.available(), reason="the native library is not built"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
]
PROMPT = tiny.prompt(23, 1)
TABLES = ("embed_tokens", "lm_head")


@dataclass(frozen=True)
class Kind:
    """One kind of adapter of one family."""

    family: str
    modules: str | tuple[str, ...]
    config: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)


KINDS = {
    "LoRA": Kind("llama", ("q_proj", "v_proj")),
    "everything": Kind("qwen3", "all-linear", {"rank_pattern": {"v_proj": 3}, "alpha_pattern": {"o_proj": 3}}),
    "rsLoRA": Kind("llama", ("q_proj", "down_proj"), {"use_rslora": True}),
    "DoRA": Kind("llama", "all-linear", {"use_dora": True}),
    "fused": Kind("phi3", ("qkv_proj", "gate_up_proj")),
    "tables": Kind("llama", (*TABLES, "q_proj"), {"use_rslora": True}),
    "shared table": Kind("qwen3", TABLES, model={"tie_word_embeddings": True}),
    "tied": Kind("qwen3", TABLES, {"ensure_weight_tying": True}, {"tie_word_embeddings": True}),
    "head of a shared table": Kind("qwen3", ("lm_head",), model={"tie_word_embeddings": True}),
    "scaled embedding": Kind("gemma3", TABLES),
    "capped logits": Kind("gemma2", (*TABLES, "up_proj")),
    "DoRA of tables": Kind("llama", TABLES, {"use_dora": True}),
    # With a pad token transformers 5.23 sets that row of its embedding to 0, whatever the file has.
    "latent attention": Kind("youtu", "all-linear", model={"pad_token_id": None}),
    "DoRA of a scaled embedding": Kind("gemma3", ("embed_tokens",), {"use_dora": True}),
}


def write(kind: Kind, folder: Path, prompt: Sequence[int] = PROMPT) -> torch.Tensor:
    """A model and an adapter in `folder`, and PEFT's logits [tokens, vocab] of both together."""
    tiny.save(kind.family, folder / "model", **kind.model)
    torch.manual_seed(7)
    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=kind.modules, task_type="CAUSAL_LM", init_lora_weights=False, **kind.config
    )
    model = peft.get_peft_model(tiny.transformers.AutoModelForCausalLM.from_pretrained(folder / "model"), config)
    for name, parameter in model.named_parameters():
        if "lora_magnitude" in name:
            parameter.data *= torch.rand_like(parameter) + 0.5
        elif "lora_embedding" in name:
            parameter.data *= 0.05  # drawn as wide as an embedding's rows
    model.eval().save_pretrained(folder / "adapter")
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([list(prompt)]), use_cache=False).logits[0].float()
    return found


def adapted(folder: Path) -> Adapted:
    """The model with the adapter in slot 1."""
    model, checkpoint = load(folder / "model"), open_checkpoint(folder / "model")
    targets = add_adapters(model, model.kernels, 2, 8)
    stored = StoredMatrices(checkpoint, plan_weights(model, checkpoint, LoadTarget(torch.float32)))
    use = AdapterUse(adapter_digest(folder / "adapter"), str(folder / "adapter"))
    for slots, entry in AdapterLoader(targets, model.renames, stored.pieces).load(use):
        slots.put(1, entry)
    return Adapted(model, seed=1)


@pytest.mark.parametrize("name", KINDS)
def test_it_says_what_peft_says(name: str, tmp_path: Path) -> None:
    expected = write(KINDS[name], tmp_path)
    plain = tiny.reference_logits(tiny.transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model"), PROMPT)
    harness = adapted(tmp_path)
    with torch.inference_mode():
        found = torch.cat([harness.step({"a": part})["a"] for part in (PROMPT[:9], PROMPT[9:22], PROMPT[22:])])
    assert tiny.distance(plain, expected) > 0.05
    assert tiny.distance(found, expected) < 1e-4


@pytest.mark.parametrize("name", ["correction_coefs", "prediction_coefs"])
def test_what_adapters_cannot_change_is_told(name: str, tmp_path: Path) -> None:
    write(Kind("gemma3n", (name,)), tmp_path)
    with pytest.raises(CheckpointError, match="adapters cannot change here"):
        adapted(tmp_path)


def test_another_table_than_the_models_is_refused(tmp_path: Path) -> None:
    write(KINDS["tables"], tmp_path)
    model = tiny.make("llama")
    model.get_input_embeddings().weight.data[40] *= 2
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(CheckpointError, match="that is not the model's"):
        adapted(tmp_path)


class Activated(Adapted):
    """Row "a" begins with all of PROMPT's tokens; those from the adapter's invocation on have it."""

    first: int

    def _batch(self, work: Mapping[str, Sequence[int]]) -> Batch:
        batch = super()._batch(work)
        assert batch.adapter_slot is not None
        return replace(batch, adapter_slot=torch.where(batch.positions[0][:, None] >= self.first, 1, 0))


@pytest.mark.parametrize(("invocation", "begins"), [((5, 6), 13), ((9, 9, 9), 0), ((4, 3, 2), None)])
def test_an_activated_adapter_counts_from_its_last_invocation_on(
    invocation: tuple[int, ...], begins: int | None, tmp_path: Path
) -> None:
    prompt = [*(9,) * 3, 5, 6, 7, 8, 5, 7, 6, 5, 4, 3, 5, 6, 1]
    kind = Kind("llama", "all-linear", {"alora_invocation_tokens": list(invocation)})
    expected = write(kind, tmp_path, prompt)
    use, _ = read_adapter(tmp_path / "adapter")
    counting = activated((use,), prompt)
    assert [one.first for one in counting] == ([] if begins is None else [begins])
    model = adapted(tmp_path).model
    harness = Activated(model, seed=1)
    harness.first = len(prompt) if begins is None else begins
    with torch.inference_mode():
        found = harness.step({"a": prompt})["a"]
    assert tiny.distance(found, expected) < 1e-4
