"""What adapters cost: one in all rows, another in each row, and traffic over a thousand of them, each over none.

Random weights of Llama-3.2-1B's shape and random adapters of rank 16 on queries and values, over one shared file of
matrices. Cases run in turns, `--repeat` times; a case is `--rows` sequences at a time, `--requests` of them, each with
a prompt of 16 tokens and `--tokens` generated. Beside tokens by the clock those by the processor's time are told, which
neighbours change less. Zipf's traffic draws adapters with probability 1 / rank over all that
are registered. A cold adapter's first token is compared with a warm one's on an idle engine. Medians.
python -m benchmarks.adapters
With --soak SECONDS a real server's adapters come and go instead (`benchmarks.adapter_soak`).
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from benchmarks.adapter_soak import soak
from benchmarks.report import arguments, report
from penstock.config.adapters import AdapterUse
from penstock.config.options import EngineOptions
from penstock.config.sampling import SamplingParams
from penstock.core.request import EngineRequest
from penstock.engine.build import build_engine
from penstock.engine.loop import Engine
from penstock.weights.adapters.open import adapter_digest

SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192,
    "vocab_size": 128256,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True,
    "hidden_act": "silu", "dtype": "bfloat16",
}  # fmt: skip
RANK, PROMPT = 16, 16
_COLUMNS = {"tokens_per_s": 1, "ratio": 3, "processor_ratio": 3}


def write_adapters(folder: Path, count: int) -> list[AdapterUse]:
    """So many adapters, all different."""
    random, found = np.random.default_rng(1), []
    sizes = {"q_proj": 2048, "v_proj": 512}
    tensors = {}
    for layer in range(SHAPE["num_hidden_layers"]):
        for name, outputs in sizes.items():
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{stem}.lora_A.weight"] = (random.standard_normal((RANK, 2048)) * 0.02).astype(np.float16)
            tensors[f"{stem}.lora_B.weight"] = (random.standard_normal((outputs, RANK)) * 0.02).astype(np.float16)
    weights = folder / "weights"
    save_file(tensors, weights)  # which all share; how much of it counts differs, so that each is another adapter
    for number in range(count):
        place = folder / f"{number}"
        place.mkdir()
        config = {"peft_type": "LORA", "lora_alpha": RANK + number / count, "base_model_name_or_path": "1b"}
        (place / "adapter_config.json").write_text(json.dumps(config))
        os.link(weights, place / "adapter_model.safetensors")
        found.append(AdapterUse(adapter_digest(place), str(place)))
    return found


class Work:
    """One engine, asked again and again."""

    def __init__(self, engine: Engine, tokens: int, vocabulary: int) -> None:
        self._engine, self._tokens, self._vocabulary = engine, tokens, vocabulary
        self._number = 0

    def request(self, uses: Sequence[AdapterUse]) -> EngineRequest:
        self._number += 1
        random = np.random.default_rng(self._number)
        prompt = tuple(map(int, random.integers(0, self._vocabulary, PROMPT)))
        params = SamplingParams(temperature=0.0, max_tokens=self._tokens)
        return EngineRequest(f"r{self._number}", prompt, params, adapters=tuple(uses))

    def run(self, requests: Sequence[EngineRequest]) -> tuple[float, float]:
        """Generated tokens a second, and a second of the processor's."""
        engine, count = self._engine, 0
        begun, worked = time.perf_counter(), time.process_time()
        for one in requests:
            engine.add(one)
        while engine.has_work:
            for waited, refused in engine.adapters.ready():
                if refused is not None:
                    raise refused
                engine.add(waited)
            count += sum(len(output.tokens) for output in engine.step())
        return count / (time.perf_counter() - begun), count / (time.process_time() - worked)

    def first_token(self, use: AdapterUse) -> float:
        """Seconds to the first token of a request on an idle engine."""
        engine, one = self._engine, self.request((use,))
        begun = time.perf_counter()
        engine.add(one)
        first = 0.0
        while engine.has_work:
            for waited, _ in engine.adapters.ready():
                engine.add(waited)
            if any(output.tokens for output in engine.step()) and not first:
                first = time.perf_counter() - begun
        return first


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--registered", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--quantize", default="q4_k_m")
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--soak", type=float, metavar="SECONDS")
    given = parser.parse_args()
    if given.soak is not None:
        report_soak(given)
        return
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(SHAPE))
        uses = write_adapters(folder, given.registered)
        figures = measure(given, folder / "model", uses)
    rows = [
        (name, *(f"{found[key]:.{digits}f}" for key, digits in _COLUMNS.items()))
        for name, found in figures["cases"].items()
    ]
    cold = figures["first_token_s"]
    rows.append(("first token, cold less warm", f"{1e3 * (cold['cold'] - cold['warm']):.1f} ms", "", ""))
    report("adapters", given.results, figures, ("case", "tokens/s", "over none", "over none by processor"), rows)


def report_soak(given: Any) -> None:
    """Exits with 1 where something was wrong."""
    found = asyncio.run(soak(given.soak))
    counts = {name: value for name, value in asdict(found).items() if isinstance(value, int)}
    for told in found.wrong[:20]:
        print(told)
    memory = [size for _, size in found.memory]
    held = {"middle": memory[len(memory) // 2], "end": memory[-1]}
    figures = {"seconds": given.soak, **counts, "wrong": found.wrong, "engine_bytes": held}
    report("adapter_soak", given.results, figures, ("what", "count"), [*counts.items(), ("wrong", len(found.wrong))])
    if found.wrong:
        raise SystemExit(1)


def measure(given: Any, model: Path, uses: Sequence[AdapterUse]) -> dict[str, Any]:
    """All cases in turns, then first tokens."""
    options = EngineOptions(
        model=str(model), load_format="dummy", quantize=given.quantize, isa=given.isa, max_num_seqs=given.rows,
        max_model_len=256, enable_lora=True, max_loras=given.rows, max_lora_rank=RANK, enable_prefix_caching=False,
    )  # fmt: skip
    engine, _ = build_engine(options)
    work = Work(engine, given.tokens, SHAPE["vocab_size"])
    weights = 1 / np.arange(1, len(uses) + 1)
    drawn = np.random.default_rng(2).choice(len(uses), given.requests * given.repeat, p=weights / weights.sum())
    cases: dict[str, list[tuple[float, float]]] = {"none": [], "one": [], "one a row": [], "zipf": []}
    try:
        for turn in range(given.repeat + 1):  # the first one warms up
            mine = drawn[(turn - 1) * given.requests :][: given.requests] if turn else drawn[: given.requests]
            chosen: dict[str, Any] = {
                "none": [()] * given.requests,
                "one": [uses[:1]] * given.requests,
                "one a row": [uses[number % given.rows :][:1] for number in range(given.requests)],
                "zipf": [uses[number:][:1] for number in mine],
            }
            for name, each in chosen.items():
                speed = work.run([work.request(own) for own in each])
                if turn:
                    cases[name].append(speed)
                    print(f"{name}: {speed[0]:.1f} tokens/s", flush=True)
        cold = [work.first_token(use) for use in uses[-12:]]
        warm = [work.first_token(use) for use in uses[-12:]]
    finally:
        engine.close()
    found = {name: over(runs, cases["none"]) for name, runs in cases.items()}
    first = {"cold": statistics.median(cold), "warm": statistics.median(warm)}
    keys = ("rows", "requests", "tokens", "registered", "repeat", "quantize", "isa")
    return {**{key: getattr(given, key) for key in keys}, "rank": RANK, "cases": found, "first_token_s": first}


def over(runs: Sequence[tuple[float, float]], none: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """A case's figures, and its ratios to runs without adapters beside them."""
    pairs = list(zip(runs, none, strict=True))
    return {
        "tokens_per_s": statistics.median(run for run, _ in runs),
        "ratio": statistics.median(run[0] / base[0] for run, base in pairs),
        "processor_ratio": statistics.median(run[1] / base[1] for run, base in pairs),
        "runs": [run for run, _ in runs],
        "processor_runs": [run for _, run in runs],
    }


if __name__ == "__main__":
    main()
