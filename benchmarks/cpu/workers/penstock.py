"""Penstock through its public Python class, streaming, as a program would use it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.cpu.workers.protocol import Run, Times, serve
from penstock import AsyncLLM, __version__


def load(setup: Mapping[str, Any]) -> tuple[Run, dict[str, str]]:
    """`options` are those of `AsyncLLM`."""
    llm = AsyncLLM(setup["model"], threads=setup["threads"], **setup["options"])
    loop = asyncio.new_event_loop()
    loop.run_until_complete(llm.start())

    async def one(prompt: Sequence[int], new: int) -> list[float]:
        times: list[float] = []
        sampling = llm.sampling(temperature=0, max_tokens=new, ignore_eos=True, repetition_penalty=1.0)
        async for delta in llm.generate(prompt, sampling):
            times += [time.perf_counter()] * len(delta.token_ids)
        return times

    async def every(prompts: Sequence[Sequence[int]], new: int) -> Times:
        started = time.perf_counter()
        return started, list(await asyncio.gather(*(one(prompt, new) for prompt in prompts)))

    def run(prompts: Sequence[Sequence[int]], new: int) -> Times:
        return loop.run_until_complete(every(prompts, new))

    info = llm.info
    chosen = {f"setting {choice.name}": choice.value for choice in info.settings}
    chosen |= {f"kernel {choice.name}": choice.value for choice in info.kernels}
    return run, {"version": __version__, "dtype": info.dtype, "determinism": info.determinism, **chosen}


if __name__ == "__main__":
    serve(load)
