"""What one request at a time gets elsewhere: transformers' `generate`, or, without it, plain torch in its shapes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.measure import Figure, Setting
from benchmarks.gpu.shapes import config

MODEL = "Llama-3.1-8B"
INPUT, OUTPUT = 512, 64


def peer(setting: Setting) -> Iterator[Figure]:
    """Generated tokens a second of batch 1, beside this engine's throughput."""
    given, wanted = (5, 2) if setting.tiny else (INPUT, OUTPUT)
    uses = find_spec("transformers") is not None and setting.on_gpu
    name = "transformers generate" if uses else "plain torch, layer by layer, in place of transformers"
    generate = (_transformers if uses else _plain)(setting)
    with torch.inference_mode():
        generate(given, 2)
        setting.synchronize()
        started = time.perf_counter()
        generate(given, 2 if setting.compiling else wanted)
        setting.synchronize()
    rate = wanted / (time.perf_counter() - started)
    yield Figure(f"{name}, batch 1", rate, "tokens/s")
    if ours := setting.kept.get("throughput None"):
        yield Figure(f"throughput in bf16, beside {name.partition(',')[0]}", ours / rate, "times", least=20)


def _transformers(setting: Setting) -> Callable[[int, int], object]:
    import transformers

    fields = {name: value for name, value in config(MODEL, setting.tiny).items() if name != "architectures"}
    before = torch.get_default_dtype()
    torch.set_default_dtype(setting.dtype)
    try:
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields))
        model = model.to_empty(device=setting.torch_device).eval()
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.02)
        for module in model.modules():
            if hasattr(module, "inv_freq"):
                module.inv_freq.copy_(1.0 / 500_000 ** torch.linspace(0, 1, len(module.inv_freq)))

    def generate(given: int, wanted: int) -> object:
        ids = torch.randint(3, fields["vocab_size"], (1, given), device=setting.torch_device)
        mask = torch.ones_like(ids)
        return model.generate(
            ids, attention_mask=mask, do_sample=False, min_new_tokens=wanted, max_new_tokens=wanted, pad_token_id=0
        )

    return generate


def _plain(setting: Setting) -> Callable[[int, int], object]:
    """A Llama of torch's own ops; all layers have the same weights, but each a copy, so that none is in a cache."""
    shape = config(MODEL, setting.tiny)
    hidden, dim = shape["hidden_size"], shape["head_dim"]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    sizes = (
        (hidden, (heads + 2 * kv_heads) * dim), (heads * dim, hidden),
        (hidden, 2 * shape["intermediate_size"]), (shape["intermediate_size"], hidden),
    )  # fmt: skip
    layers = [
        [setting.random(outputs, inputs) * inputs**-0.5 for inputs, outputs in sizes]
        for _ in range(shape["num_hidden_layers"])
    ]
    table = setting.random(shape["vocab_size"], hidden)

    def step(ids: Tensor, caches: list[tuple[Tensor, Tensor]]) -> Tensor:
        x = table[ids]
        for number, (qkv, out, gate_up, down) in enumerate(layers):
            parts = functional.linear(functional.rms_norm(x, (hidden,)), qkv).view(len(ids), -1, dim).transpose(0, 1)
            query, key, value = parts.split((heads, kv_heads, kv_heads))
            if len(caches) > number:
                key, value = (torch.cat(pair, dim=1) for pair in zip(caches[number], (key, value), strict=True))
                caches[number] = key, value
            else:
                caches.append((key, value))
            mixed = functional.scaled_dot_product_attention(
                query[None], key[None], value[None], is_causal=len(ids) > 1, enable_gqa=True
            )[0]
            x = x + functional.linear(mixed.transpose(0, 1).flatten(1), out)
            gate, up = functional.linear(functional.rms_norm(x, (hidden,)), gate_up).chunk(2, dim=1)
            x = x + functional.linear(functional.silu(gate) * up, down)
        return functional.linear(functional.rms_norm(x[-1:], (hidden,)), table).argmax(dim=1)

    def generate(given: int, wanted: int) -> object:
        caches: list[tuple[Tensor, Tensor]] = []
        token = step(torch.randint(0, shape["vocab_size"], (given,), device=setting.torch_device), caches)
        for _ in range(wanted - 1):
            token = step(token, caches)
            token.item()
        return token

    return generate
