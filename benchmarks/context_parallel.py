"""Long contexts over two processes, against one of as many threads: python -m benchmarks.context_parallel

For a model of latent attention and one with a single KV head, of random weights. Engines are there at once, each in a
process of its own, and take turns: a whole prompt, then 512 tokens and an answer behind it, whose beginning is found in
the cache.
"""

from __future__ import annotations

import json
import random
import shutil
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.ranks import Engine
from benchmarks.report import arguments, report
from penstock.config.options import EngineOptions
from penstock.startup.engine_spec import make_engine_spec
from penstock.weights.open import bundled_model_path

BASE: dict[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 16, "vocab_size": 30_000,
    "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu",
}  # fmt: skip
SHAPES: Mapping[str, dict[str, Any]] = {
    "latent": {
        **BASE, "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "num_key_value_heads": 16,
        "q_lora_rank": None, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "first_k_dense_replace": 64, "n_routed_experts": 2, "n_shared_experts": 1, "num_experts_per_tok": 1,
        "moe_intermediate_size": 64,
    },
    "one KV head": {
        **BASE, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_key_value_heads": 1,
        "head_dim": 128,
    },
}  # fmt: skip
ANSWER, MORE = 48, 512
WAYS: Mapping[str, dict[str, Any]] = {
    "one process": {},
    "ranks": {"tensor_parallel_size": 2},
    "ranks that share contexts": {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
}
COLUMNS = ["shape", "work", *(f"{way}, tokens/s" for way in WAYS), "sharing over one process", "lowest, highest"]


def make_model(folder: Path, shape: str, layers: int) -> Path:
    """A configuration without weights, and a tokenizer."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**SHAPES[shape], "num_hidden_layers": layers}), encoding="utf-8")
    for file in bundled_model_path().glob("tokenizer*.json"):
        shutil.copy(file, folder)
    return folder


def settings_of(given: Any, model: Path) -> dict[str, Any]:
    return {
        "model": str(model),
        "device": "cpu",
        "threads": given.threads,
        "max_model_len": given.context + MORE + ANSWER + 64,
        "max_num_seqs": 1,
        "kv_cache_memory": given.memory << 20,
        "load_format": "dummy",
        "quantize": given.quantize,
        "pack_cache": "off",
    }


def kept(settings: Mapping[str, Any], way: Mapping[str, Any]) -> dict[str, float]:
    """Bytes that a rank keeps of a token, and tokens there is room for in the same memory of all ranks together."""
    spec = make_engine_spec(EngineOptions(**settings, **way))
    size, blocks = spec.options.block_size, spec.plan.kv_blocks[0]
    return {"bytes of a token": sum(spec.plan.kv_block_bytes) / size, "tokens": float((blocks - 1) * size)}


def measure(given: Any, model: Path) -> dict[str, Any]:
    """Seconds of each work by engine, round by round."""
    settings = settings_of(given, model)
    memory = {way: kept(settings, more) for way, more in WAYS.items()}
    engines = {way: Engine(**settings, **more) for way, more in WAYS.items()}
    rng, seconds = random.Random(1), defaultdict[str, dict[str, list[float]]](lambda: defaultdict(list))
    prompt = [rng.randrange(5, 30_000) for _ in range(given.context)]
    whole = f"prompt of {given.context} tokens"
    for way, engine in engines.items():
        seconds[whole][way].append(engine.run([prompt], 1)[0])
    for turn in range(given.rounds + 1):
        behind = [*prompt, *(rng.randrange(5, 30_000) for _ in range(MORE))]
        for name, asked, tokens in (
            (f"{MORE} tokens behind it", behind, 1),
            (f"answer of {ANSWER} behind it", prompt, ANSWER),
        ):
            for way in rng.sample(list(engines), len(engines)):
                took, _ = engines[way].run([asked], tokens)
                if turn:  # the first warms up
                    seconds[name][way].append(took)
    for engine in engines.values():
        engine.close()
    return {"seconds": seconds, "memory": memory}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--memory", type=int, default=256, help="of keys and values, of all ranks together, MiB")
    parser.add_argument("--quantize", default=None)
    parser.add_argument("--threads", type=int, default=2, help="of one process, and of all ranks together")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    rows, figures = [], dict[str, Any]()
    for shape in given.shapes:
        with tempfile.TemporaryDirectory() as folder:
            found = figures[shape] = measure(given, make_model(Path(folder) / "model", shape, given.layers))
        for name, taken in found["seconds"].items():
            tokens = given.context if name.startswith("prompt") else ANSWER if "answer" in name else MORE
            speeds = [tokens / statistics.median(taken[way]) for way in WAYS]
            ratios = sorted(
                one / many for one, many in zip(taken["one process"], taken["ranks that share contexts"], strict=True)
            )
            rows.append([shape, name, *speeds, statistics.median(ratios), f"{ratios[0]:.2f}, {ratios[-1]:.2f}"])
        for what in ("bytes of a token", "tokens"):
            rows.append([shape, f"{what}, in a rank", *(found["memory"][way][what] for way in WAYS), "", ""])
    report(f"context_parallel_{given.context}", given.results, figures, COLUMNS, rows)


if __name__ == "__main__":
    main()
