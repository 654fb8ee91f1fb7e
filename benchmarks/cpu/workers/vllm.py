"""vLLM's CPU wheel, in process, one engine step at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.cpu.workers.protocol import Run, Times, serve


def hold_isa() -> None:
    """Makes vLLM take its AVX2 build where ATEN_CPU_CAPABILITY says avx2: it asks the processor, not that variable."""
    if os.environ.get("ATEN_CPU_CAPABILITY") != "avx2":
        return
    import torch

    for name in ("_is_avx512_supported", "_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        setattr(torch.cpu, name, lambda: False)


def engine(setup: Mapping[str, Any]) -> Any:
    """An engine in this process; `options` are those of `vllm.LLM`."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(setup["cache_gib"])
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["OMP_NUM_THREADS"] = str(setup["threads"])
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{setup['threads'] - 1}"
    hold_isa()
    import vllm  # type: ignore[import-not-found]

    llm = vllm.LLM(
        model=setup["model"],
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=setup["length"],
        max_num_batched_tokens=setup["length"],
        max_num_seqs=setup["sequences"],
        enable_prefix_caching=setup["caching"],
        **setup.get("options", {}),
    )
    return llm.llm_engine


def load(setup: Mapping[str, Any]) -> tuple[Run, dict[str, str]]:
    """Starts the engine."""
    made = engine(setup)
    import vllm

    count = 0

    def run(prompts: Sequence[Sequence[int]], new: int) -> Times:
        nonlocal count
        params = vllm.SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        times: dict[str, list[float]] = {}
        started = time.perf_counter()
        for prompt in prompts:
            times[str(count)] = []
            made.add_request(str(count), {"prompt_token_ids": list(prompt)}, params)
            count += 1
        while made.has_unfinished_requests():
            outputs = made.step()
            now = time.perf_counter()
            for output in outputs:
                found = times[output.request_id]
                found += [now] * (len(output.outputs[0].token_ids) - len(found))
        return started, list(times.values())

    return run, {"version": vllm.__version__, "kv": "bfloat16"}


if __name__ == "__main__":
    serve(load)
