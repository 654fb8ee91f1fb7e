"""Experts that change places by measured load over those that stay: python -m benchmarks.expert_balance

A model of random weights whose router, biased by hand, has most tokens go to experts of the first rank. Both engines
are there at once, each of two processes of one thread, and take turns, work by work; answers are equal, also while
experts move. `--copies` has some experts twice. Where others use the machine too, the CPU time of the busier process
says more than seconds: that is what a step takes when each process has a core.
"""

from __future__ import annotations

import json
import random
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from safetensors.numpy import save_file

from benchmarks.ranks import Engine
from benchmarks.report import arguments, report
from penstock import LLM
from penstock.weights.dummy import open_dummy
from penstock.weights.open import bundled_model_path

WORKS = {  # sequences, tokens of a prompt and of an answer
    "prompt of 512 tokens": (1, 512, 1),
    "16 sequences": (16, 16, 24),
}
COLUMNS = [
    *("work", "experts stay, tokens/s", "experts move, tokens/s", "move over stay", "lowest, highest"),
    *("CPU of the busier process, stay, s", "move, s", "stay over move"),
]
SHAPE: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "moe_intermediate_size": 1024,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 0,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "n_shared_experts": 0,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "vocab_size": 32_000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float16",
}


def biased_model(folder: Path, bias: float) -> Path:
    """A checkpoint of SHAPE in which the choice of a layer's first half of experts is helped by that much."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE), encoding="utf-8")
    made = open_dummy(folder)
    tensors = {}
    for name, info in made.tensors.items():
        values = made.read(name).data.view(np.float16 if info.format == "f16" else np.float32).reshape(info.shape)
        if name.endswith("e_score_correction_bias"):
            values = np.where(np.arange(len(values)) < len(values) // 2, bias, 0).astype(np.float32)
        tensors[name] = values
    save_file(tensors, folder / "model.safetensors")
    for file in bundled_model_path().glob("tokenizer*.json"):  # any will do
        shutil.copy(file, folder)
    return folder


def cpu_seconds() -> list[float]:
    """Of this process and of the other ranks'."""
    this = psutil.Process()
    return [sum(one.cpu_times()[:2]) for one in (this, *this.children())]


def serve(pipe: Connection, settings: dict[str, Any]) -> None:
    """An engine that does works as it is told: sends the seconds each took, of CPUs too, and what was answered."""
    with LLM(**settings) as llm:
        pipe.send({one.name: f"{one.value} {one.reason}" for one in llm.info.settings})
        while (work := pipe.recv()) is not None:
            prompts, tokens = work
            before, started = cpu_seconds(), time.perf_counter()
            answers = llm.generate(prompts, max_tokens=tokens, temperature=0, ignore_eos=True)
            seconds = time.perf_counter() - started
            busier = max(end - begin for begin, end in zip(before, cpu_seconds(), strict=True))
            pipe.send(((seconds, busier), [answer.outputs[0].token_ids for answer in answers]))


def measure(given: Any, model: Path) -> dict[str, Any]:
    """Seconds of each work by engine, round by round."""
    settings: dict[str, Any] = {
        "model": str(model),
        "device": "cpu",
        "threads": given.ranks,
        "tensor_parallel_size": given.ranks,
        "enable_expert_parallel": True,
        "max_model_len": 768,
        "max_num_seqs": 16,
        "kv_blocks": 400,
        "enable_prefix_caching": False,
        "quantize": given.quantize,
        "pack_cache": "off",
    }
    moving = {"enable_eplb": True, "num_redundant_experts": given.copies, "eplb_step_interval": given.interval}
    engines = {"stay": Engine(serve, **settings), "move": Engine(serve, **settings, **moving)}
    rng, seconds = random.Random(1), defaultdict[str, dict[str, list[Any]]](lambda: defaultdict(list))
    for turn in range(given.rounds + given.warm):
        for name, (count, length, tokens) in WORKS.items():
            prompts = [[rng.randrange(5, 30_000) for _ in range(length)] for _ in range(count)]
            answers = []
            for which in rng.sample(list(engines), len(engines)):
                took, said = engines[which].run(prompts, tokens)
                answers.append(said)
                if turn >= given.warm:  # until then experts move
                    seconds[name][which].append(took)
            assert answers[0] == answers[1], f"{name}: answers differ"
    told = {name: engine.settings for name, engine in engines.items()}
    for engine in engines.values():
        engine.close()
    return {"seconds": seconds, "settings": told}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--quantize", default=None)
    parser.add_argument("--ranks", type=int, default=2, help="processes, of one thread each")
    parser.add_argument("--bias", type=float, default=0.5, help="of the first half of experts, beside scores of 0 to 1")
    parser.add_argument("--copies", type=int, default=0)
    parser.add_argument("--interval", type=int, default=50, help="steps after which experts may move")
    parser.add_argument("--warm", type=int, default=6, help="rounds that do not count, in which they do")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(given, biased_model(Path(folder) / "model", given.bias))
    rows = []
    for name, (count, length, tokens) in WORKS.items():
        taken, busy = (
            {engine: [one[part] for one in found] for engine, found in figures["seconds"][name].items()}
            for part in (0, 1)
        )
        ratios = sorted(stay / move for stay, move in zip(taken["stay"], taken["move"], strict=True))
        done = count * (length if tokens == 1 else tokens)
        speeds = [done / statistics.median(taken[engine]) for engine in ("stay", "move")]
        cpu = [statistics.median(busy[engine]) for engine in ("stay", "move")]
        spread = f"{ratios[0]:.2f}, {ratios[-1]:.2f}"
        rows.append([name, *speeds, statistics.median(ratios), spread, *cpu, cpu[0] / cpu[1]])
    report("expert_balance", given.results, figures, COLUMNS, rows)


if __name__ == "__main__":
    main()
