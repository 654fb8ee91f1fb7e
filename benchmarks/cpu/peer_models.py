"""Random-weight models in real shapes, for every engine: a Hugging Face folder, GGUF files, OpenVINO folders.

Weights are normal(0, 0.02) in bfloat16, each tensor from its own seed, so that all files of a shape hold the same
model. Vocabularies and their sizes are real. Rotary scaling for long contexts is left out; it costs no time.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import save_file
from tokenizers import decoders

from benchmarks.cpu.peer_install import Places
from benchmarks.cpu.peer_works import CLASSES
from penstock.text.gguf_vocab import read_gguf_vocab
from penstock.weights.readers.gguf_file import read_gguf_file

DEVIATION = 0.02
CONTEXT = 16384


@dataclass(frozen=True, slots=True)
class ModelDimensions:
    """A decoder's dimensions, in elements; `experts` 0 means a dense feed-forward layer."""

    name: str
    family: str
    vocabulary: str
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    theta: float
    epsilon: float
    tied: bool
    experts: int = 0
    chosen: int = 0
    gguf_only: bool = False

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalised per head."""
        return self.family.startswith("qwen3")


SHAPES = {
    shape.name: shape
    for shape in (
        ModelDimensions("qwen3-0.6b", "qwen3", "qwen2", 151936, 1024, 3072, 28, 16, 8, 128, 1e6, 1e-6, True),
        ModelDimensions("llama-3.2-1b", "llama", "llama-bpe", 128256, 2048, 8192, 16, 32, 8, 64, 5e5, 1e-5, True),
        ModelDimensions(
            "llama-3.1-8b", "llama", "llama-bpe", 128256, 4096, 14336, 32, 32, 8, 128, 5e5, 1e-5, False, gguf_only=True
        ),
        # Qwen3-30B-A3B with hidden size, experts, query heads and vocabulary divided by 8; one KV head where 4/8 would
        # be half of one. The experts' down projections have 96 columns, so K-quants fall back to 32-wide blocks there.
        ModelDimensions(
            "qwen3-moe-eighth",
            "qwen3moe",
            "qwen2",
            18992,
            256,
            96,
            48,
            4,
            1,
            128,
            1e6,
            1e-6,
            False,
            experts=128,
            chosen=8,
            gguf_only=True,
        ),
    )
}

# llama-quantize's arguments for each GGUF format; its MXFP4 preset is for experts only, so dense layers are named.
QUANTIZE = {
    "q4_k_m": ("Q4_K_M",),
    "q5_k_m": ("Q5_K_M",),
    "q6_k": ("Q6_K",),
    "q8_0": ("Q8_0",),
    "q4_0": ("Q4_0",),
    "iq4_xs": ("IQ4_XS",),
    "mxfp4": ("--tensor-type", "attn=mxfp4", "--tensor-type", "ffn=mxfp4", "Q8_0"),
}
OPENVINO = {
    "int4": ("--weight-format", "int4", "--sym", "--group-size", "128", "--ratio", "1.0"),
    "int8": ("--weight-format", "int8"),
    "fp16": ("--weight-format", "fp16"),
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """One weight: its two names, shape (rows first) and whether it is a norm (ones, float32 in GGUF).

    `heads` is set on query and key projections of the Llama family, whose rows GGUF stores with rotary pairs adjacent.
    """

    hf: str
    gguf: str
    dims: tuple[int, ...]
    norm: bool = False
    heads: int = 0


def tensors(shape: ModelDimensions) -> Iterator[Tensor]:
    """Every weight of a shape, in file order."""
    hidden, vocab = shape.hidden, shape.vocab
    yield Tensor("model.embed_tokens.weight", "token_embd.weight", (vocab, hidden))
    for layer in range(shape.layers):
        yield from _layer(shape, f"model.layers.{layer}.", f"blk.{layer}.")
    yield Tensor("model.norm.weight", "output_norm.weight", (hidden,), norm=True)
    if not shape.tied:
        yield Tensor("lm_head.weight", "output.weight", (vocab, hidden))


def _layer(shape: ModelDimensions, hf: str, out: str) -> Iterator[Tensor]:
    hidden, q, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    rotated = (shape.heads, shape.kv_heads) if shape.family == "llama" else (0, 0)
    yield Tensor(f"{hf}input_layernorm.weight", f"{out}attn_norm.weight", (hidden,), norm=True)
    yield Tensor(f"{hf}self_attn.q_proj.weight", f"{out}attn_q.weight", (q, hidden), heads=rotated[0])
    yield Tensor(f"{hf}self_attn.k_proj.weight", f"{out}attn_k.weight", (kv, hidden), heads=rotated[1])
    yield Tensor(f"{hf}self_attn.v_proj.weight", f"{out}attn_v.weight", (kv, hidden))
    yield Tensor(f"{hf}self_attn.o_proj.weight", f"{out}attn_output.weight", (hidden, q))
    if shape.qk_norm:
        yield Tensor(f"{hf}self_attn.q_norm.weight", f"{out}attn_q_norm.weight", (shape.head_dim,), norm=True)
        yield Tensor(f"{hf}self_attn.k_norm.weight", f"{out}attn_k_norm.weight", (shape.head_dim,), norm=True)
    yield Tensor(f"{hf}post_attention_layernorm.weight", f"{out}ffn_norm.weight", (hidden,), norm=True)
    many = (shape.experts,) if shape.experts else ()
    suffix = "_exps" if shape.experts else ""
    if shape.experts:
        yield Tensor(f"{hf}mlp.gate.weight", f"{out}ffn_gate_inp.weight", (shape.experts, hidden))
    for part in ("gate", "up", "down"):
        dims = (hidden, shape.intermediate) if part == "down" else (shape.intermediate, hidden)
        yield Tensor(f"{hf}mlp.{part}_proj.weight", f"{out}ffn_{part}{suffix}.weight", (*many, *dims))


def parameters(shape: ModelDimensions) -> int:
    """Number of weights."""
    return sum(torch.Size(tensor.dims).numel() for tensor in tensors(shape))


def draw(tensor: Tensor) -> torch.Tensor:
    """A tensor's bfloat16 values, the same at every call."""
    if tensor.norm:
        return torch.ones(tensor.dims, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(zlib.crc32(tensor.hf.encode()))
    return torch.empty(tensor.dims, dtype=torch.bfloat16).normal_(0, DEVIATION, generator=generator)


def hf_config(shape: ModelDimensions) -> dict[str, Any]:
    """config.json of a dense shape."""
    llama = shape.family == "llama"
    return {
        "architectures": ["LlamaForCausalLM" if llama else "Qwen3ForCausalLM"],
        "model_type": shape.family,
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": shape.epsilon,
        "rope_theta": shape.theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.theta},
        "attention_bias": False,
        "tie_word_embeddings": shape.tied,
        "torch_dtype": "bfloat16",
        "initializer_range": DEVIATION,
    }


def write_hf(shape: ModelDimensions, folder: Path, data: Path) -> None:
    """Writes config, tokenizer and weights, as one safetensors file."""
    folder.mkdir(parents=True, exist_ok=True)
    metadata = vocabulary(shape, data)
    vocab = read_gguf_vocab(metadata)
    vocab.backend.decoder = decoders.ByteLevel()
    vocab.backend.save(str(folder / "tokenizer.json"))
    names = {key: metadata["tokenizer.ggml.tokens"][getattr(vocab, f"{key}_id")] for key in ("bos", "eos")}
    tokens = {f"{key}_token": name for key, name in names.items()}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": CONTEXT, **tokens}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(hf_config(shape), indent=2), encoding="utf-8")
    weights = {tensor.hf: draw(tensor) for tensor in tensors(shape)}
    save_file(weights, folder / "model.safetensors.part", metadata={"format": "pt"})
    (folder / "model.safetensors.part").rename(folder / "model.safetensors")


def vocabulary(shape: ModelDimensions, data: Path) -> dict[str, Any]:
    """GGUF tokenizer metadata of the shape's vocabulary, cut to its first `shape.vocab` tokens.

    The cut is a smaller byte-pair vocabulary of the same kind, as tokens are numbered in merge order.
    """
    read = dict(read_gguf_file(data / "tokenizers" / f"ggml-vocab-{shape.vocabulary}.gguf").metadata)
    found = {name: value for name, value in read.items() if name.startswith("tokenizer.")}
    found.pop("tokenizer.chat_template", None)
    tokens = list(found["tokenizer.ggml.tokens"])
    if shape.vocab < len(tokens):
        kept = tokens[: shape.vocab]
        known = set(kept)
        merges = [merge for merge in found["tokenizer.ggml.merges"] if merge.replace(" ", "", 1) in known]
        found |= {"tokenizer.ggml.tokens": kept, "tokenizer.ggml.merges": merges}
        found["tokenizer.ggml.token_type"] = list(found["tokenizer.ggml.token_type"])[: shape.vocab]
        for name in found:
            if name.endswith("_token_id"):
                found[name] = shape.vocab - 1
    return found


def write_gguf(shape: ModelDimensions, path: Path, data: Path) -> None:
    """Writes the bfloat16 GGUF file, one tensor in memory at a time."""
    part = path.with_suffix(".part")
    writer = gguf.GGUFWriter(part, shape.family)
    _metadata(writer, shape, vocabulary(shape, data))
    listed = list(tensors(shape))
    for tensor in listed:
        kind = gguf.GGMLQuantizationType.F32 if _full(tensor) else gguf.GGMLQuantizationType.BF16
        size = torch.Size(tensor.dims).numel() * (4 if _full(tensor) else 2)
        writer.add_tensor_info(tensor.gguf, tensor.dims, torch.empty(0).numpy().dtype, size, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in listed:
        values = draw(tensor)
        if tensor.heads:
            halves = values.view(tensor.heads, 2, -1, values.shape[1])
            values = halves.transpose(1, 2).reshape(tensor.dims).contiguous()
        array = values.float().numpy() if _full(tensor) else values.view(torch.int16).numpy()
        writer.write_tensor_data(array)
    writer.close()
    part.rename(path)


def _full(tensor: Tensor) -> bool:
    return tensor.norm or "ffn_gate_inp" in tensor.gguf


def _metadata(writer: gguf.GGUFWriter, shape: ModelDimensions, vocabulary: dict[str, Any]) -> None:
    writer.add_name(f"random {shape.name}")
    writer.add_block_count(shape.layers)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_freq_base(shape.theta)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_layer_norm_rms_eps(shape.epsilon)
    writer.add_vocab_size(shape.vocab)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.chosen)
        writer.add_expert_feed_forward_length(shape.intermediate)
    for name, value in vocabulary.items():
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        else:
            writer.add_array(name, list(value))


def gguf_path(places: Places, shape: ModelDimensions, kind: str) -> Path:
    """Where a GGUF file of a shape lies."""
    return places.models / shape.name / f"{shape.name}-{kind}.gguf"


def hf_path(places: Places, shape: ModelDimensions) -> Path:
    """Where the Hugging Face folder of a shape lies."""
    return places.models / shape.name / "hf"


def openvino_path(places: Places, shape: ModelDimensions, kind: str) -> Path:
    """Where the OpenVINO folder of a shape lies."""
    return places.models / shape.name / f"openvino-{kind}"


def decode_bytes(file: Path) -> int | None:
    """Bytes of weights a token of one sequence reads: a GGUF file's tensors, but not an embedding table of its own.

    None where there is no file, or where the weights read depend on the experts chosen.
    """
    if not file.exists():
        return None
    read = read_gguf_file(file).tensors
    if any("_exps" in name for name in read):
        return None
    table = "token_embd.weight" if "output.weight" in read else None
    return sum(len(tensor.data) for name, tensor in read.items() if name != table)


def make(places: Places, shape: ModelDimensions, kinds: list[str], data: Path, threads: int) -> None:
    """Makes what is missing of a shape's files in the wanted GGUF kinds and, for dense small shapes, the folders.

    Raises:
        subprocess.CalledProcessError: llama-quantize or the OpenVINO export failed.
    """
    places.models.joinpath(shape.name).mkdir(parents=True, exist_ok=True)
    whole = gguf_path(places, shape, "bf16")
    wanted = {CLASSES[kind]["llama.cpp"] for kind in kinds}
    missing = [kind for kind in sorted(wanted) if not gguf_path(places, shape, kind).exists()]
    if missing and not whole.exists():
        print(f"{shape.name}: {parameters(shape):,} weights to {whole}", flush=True)
        write_gguf(shape, whole, data)
    for kind in missing:
        if kind != "bf16":
            _quantize(places, whole, gguf_path(places, shape, kind), kind, threads)
    if whole.exists() and shape.gguf_only and "bf16" not in kinds:
        whole.unlink()  # 16 GB at the 8B shape
    if shape.gguf_only:
        return
    if not (hf_path(places, shape) / "model.safetensors").exists():
        write_hf(shape, hf_path(places, shape), data)
    if places.environment("openvino").exists():
        for kind, options in OPENVINO.items():
            _export(places, shape, kind, options)


def _quantize(places: Places, source: Path, target: Path, kind: str, threads: int) -> None:
    part = target.with_suffix(".part")
    *options, preset = QUANTIZE[kind]
    program = places.llama("llama-quantize")
    subprocess.run([program, *options, source, part, preset, str(threads)], check=True)
    part.rename(target)


def _export(places: Places, shape: ModelDimensions, kind: str, options: tuple[str, ...]) -> None:
    target = openvino_path(places, shape, kind)
    if target.exists():
        return
    part = target.with_name(target.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    tool = places.python("openvino").with_name("optimum-cli")
    task = ("export", "openvino", "--model", hf_path(places, shape), "--task", "text-generation-with-past")
    subprocess.run([tool, *task, *options, part], check=True)
    part.rename(target)
