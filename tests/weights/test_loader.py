"""Loading: every layout on disk, one error for all faults."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.config.cache_spec import CacheKind
from penstock.config.errors import CheckpointError
from penstock.kernels.api import resolve_kernels
from penstock.kernels.registry import KernelContext
from penstock.models.registry import build_model
from penstock.quant.formats import mxfp4
from penstock.weights.facts import model_facts
from penstock.weights.loader import load_weights
from penstock.weights.open import open_checkpoint
from penstock.weights.weight_plan import LoadTarget, plan_weights
from tests.models import tiny
from tests.models.harness import Harness, load

State = dict[str, Tensor]


def rewrite(folder: Path, change: Callable[[State], State]) -> None:
    """Applies a change to the tensors of a checkpoint folder."""
    path = folder / "model.safetensors"
    state = {key: tensor.contiguous().clone() for key, tensor in change(load_file(path)).items()}
    save_file(state, path)


def edit_config(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def logits(folder: Path, *, prefer_reference: bool = False) -> Tensor:
    """Of a prompt; the plain reference kernels never round activations."""
    checkpoint = open_checkpoint(folder)
    kernels = resolve_kernels(KernelContext("cpu", "float32", prefer_reference=prefer_reference))
    model = build_model(checkpoint.config, kernels, dtype=torch.float32)
    load_weights(model, checkpoint, plan_weights(model, checkpoint, LoadTarget(torch.float32)))
    return Harness(model).step({"row": tiny.prompt(20)})["row"]


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_stacked_experts(name: str, tmp_path: Path):
    """Checkpoints keep experts one by one or stacked."""
    theirs = tiny.save(name, tmp_path)
    single = logits(tmp_path)
    assert any(".experts.0." in key for key in load_file(tmp_path / "model.safetensors"))
    rewrite(tmp_path, lambda _: theirs.state_dict())
    assert any(key.endswith("experts.gate_up_proj") for key in load_file(tmp_path / "model.safetensors"))
    assert torch.equal(logits(tmp_path), single)


def test_packed_experts(tmp_path: Path):
    """MXFP4 blocks and scales give what their decoded values give in float."""
    theirs = tiny.save("gpt-oss", tmp_path, hidden_size=64, intermediate_size=32)
    edit_config(tmp_path, quantization_config={"quant_method": "mxfp4"})
    rng = np.random.default_rng(0)
    packed: State = {}
    plain: State = {}
    for key, tensor in theirs.state_dict().items():
        if key.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = tensor.shape
            blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), dtype=np.uint8)
            scales = rng.integers(121, 126, (experts, outputs, inputs // 32), dtype=np.uint8)
            packed |= {f"{key}_blocks": torch.from_numpy(blocks), f"{key}_scales": torch.from_numpy(scales)}
            plain[key] = torch.from_numpy(mxfp4.decode_pair(blocks, scales)).transpose(1, 2).contiguous()
        else:
            packed[key] = plain[key] = tensor
    theirs.load_state_dict(plain)
    rewrite(tmp_path, lambda _: packed)
    assert tiny.distance(logits(tmp_path, prefer_reference=True), tiny.reference_logits(theirs, tiny.prompt(20))) < 1e-4
    rewrite(tmp_path, lambda _: plain)
    assert tiny.distance(logits(tmp_path, prefer_reference=True), tiny.reference_logits(theirs, tiny.prompt(20))) < 1e-4


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_text_part_of_a_vision_model(prefix: str, tmp_path: Path):
    tiny.save("gemma3", tmp_path)
    alone = logits(tmp_path)
    inner = json.loads((tmp_path / "config.json").read_text())
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": inner, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))

    def nest(state: State) -> State:
        nested = {prefix + key.removeprefix("model."): tensor for key, tensor in state.items()}
        vision = {"vision_tower.encoder.weight": torch.ones(2), "multi_modal_projector.norm.weight": torch.ones(2)}
        return nested | vision

    rewrite(tmp_path, nest)
    assert torch.equal(logits(tmp_path), alone)


def test_ignorable_leftovers(tmp_path: Path):
    tiny.save("llama-plain-heads", tmp_path)
    expected = logits(tmp_path)

    def add(state: State) -> State:
        copy = state["model.embed_tokens.weight"].clone()
        return state | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3), "lm_head.weight": copy}

    rewrite(tmp_path, add)
    assert torch.equal(logits(tmp_path), expected)


def test_all_faults_in_one_error(tmp_path: Path):
    tiny.save("llama", tmp_path)

    def spoil(state: State) -> State:
        del state["model.layers.1.self_attn.k_proj.weight"], state["model.norm.weight"]
        state["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3, 4)
        return state | {f"extra.{index}": torch.zeros(1) for index in range(30)}

    rewrite(tmp_path, spoil)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    message = str(caught.value)
    assert "2 missing: model.layers.1.self_attn.k_proj.weight, model.norm.weight" in message
    shape = "(is [3, 4], must be [44, 36]: hidden_size is 36, intermediate_size is 44)"
    assert f"model.layers.0.mlp.up_proj.weight {shape}" in message
    assert "30 unknown to this architecture: extra.0" in message
    assert "(10 more)" in message
    assert message.count("extra.") == 20


def test_a_tied_tensor_is_named_once(tmp_path: Path):
    tiny.save("qwen2", tmp_path)
    rewrite(tmp_path, lambda state: state | {"model.embed_tokens.weight": torch.zeros(3, 4)})
    with pytest.raises(CheckpointError, match=r"1 of another shape .*: model\.embed_tokens\.weight \(is \[3, 4\]"):
        load(tmp_path)
    rewrite(tmp_path, lambda state: {key: state[key] for key in state if key != "model.embed_tokens.weight"})
    with pytest.raises(CheckpointError, match=r"1 missing: model\.embed_tokens\.weight"):
        load(tmp_path)


@pytest.mark.parametrize("stated", [True, None])
@pytest.mark.parametrize(
    ("family", "embedding", "head"),
    [
        ("llama", "model.embed_tokens.weight", "lm_head.weight"),
        ("gemma", "model.embed_tokens.weight", "lm_head.weight"),
        ("gpt-neox", "gpt_neox.embed_in.weight", "embed_out.weight"),
        ("gpt2", "transformer.wte.weight", "lm_head.weight"),
    ],
)
def test_a_head_of_its_own_is_not_tied(family: str, embedding: str, head: str, stated: bool | None, tmp_path: Path):
    """Whatever the configuration says; a copy of the embedding is, as if it was not there."""
    theirs = tiny.save(family, tmp_path, tie_word_embeddings=False)
    edit_config(tmp_path, tie_word_embeddings=stated)
    tokens = tiny.prompt(20)
    ours = Harness(load(tmp_path)).step({"row": tokens})["row"]
    assert tiny.distance(ours, tiny.reference_logits(theirs, tokens)) < 1e-4
    if stated:
        again = type(theirs).from_pretrained(tmp_path).eval()
        assert tiny.distance(ours, tiny.reference_logits(again, tokens)) < 1e-4
    untied = model_facts(open_checkpoint(tmp_path)).parameters
    assert untied == sum(tensor.numel() for tensor in theirs.parameters())
    rewrite(tmp_path, lambda state: state | {head: state[embedding].clone()})
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config["tie_word_embeddings"] is stated
    assert (model_facts(checkpoint).parameters < untied) is (stated is True)
    load(tmp_path)


def test_untied_head_is_not_invented(tmp_path: Path):
    tiny.save("llama", tmp_path)
    rewrite(tmp_path, lambda state: {key: tensor for key, tensor in state.items() if key != "lm_head.weight"})
    with pytest.raises(CheckpointError, match=r"1 missing: lm_head\.weight"):
        load(tmp_path)


def test_progress_and_types(tmp_path: Path):
    tiny.save("gemma3", tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    model = build_model(checkpoint.config, resolve_kernels(KernelContext("cpu", "bfloat16")), dtype=torch.bfloat16)
    seen: list[tuple[int, int]] = []
    plans = plan_weights(model, checkpoint, LoadTarget(torch.bfloat16))
    load_weights(model, checkpoint, plans, progress=lambda done, total: seen.append((done, total)))
    done, totals = [entry[0] for entry in seen], {entry[1] for entry in seen}
    assert done == sorted(done)
    assert totals == {done[-1]}
    for weight in model.weights():
        assert weight.value.dtype == (torch.float32 if weight.keep_float32 else torch.bfloat16)
        assert tuple(weight.value.shape) == weight.shape


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_headers_and_model_agree(name: str, tmp_path: Path):
    """What is planned from the headers is what the model then needs."""
    theirs = tiny.save(name, tmp_path)
    facts, model = model_facts(open_checkpoint(tmp_path)), load(tmp_path)
    assert facts.vocab_size == model.vocab_size
    assert facts.context_length == model.max_positions
    specs = [(spec.elements_per_token, spec.window) for spec in model.cache_specs if spec.kind is not CacheKind.STATE]
    assert [(layer.elements_per_token, layer.window) for layer in facts.layers if layer.elements_per_token] == specs
    stored = {tensor.data_ptr(): tensor.numel() for tensor in theirs.state_dict().values()}  # tied ones once
    assert facts.parameters == sum(stored.values())


def test_use_before_loading_is_named(tmp_path: Path):
    tiny.save("llama", tmp_path)
    kernels = resolve_kernels(KernelContext("cpu", "float32"))
    model = build_model(open_checkpoint(tmp_path).config, kernels, dtype=torch.float32)
    with pytest.raises(RuntimeError, match=r"model\.embed_tokens\.weight was used before"):
        Harness(model).step({"row": [1, 2]})
