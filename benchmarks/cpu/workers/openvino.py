"""OpenVINO GenAI's continuous-batching pipeline, in process, one step at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import openvino  # type: ignore[import-not-found]
import openvino_genai  # type: ignore[import-not-found]

from benchmarks.cpu.workers.protocol import Run, Times, serve


def pipeline(setup: Mapping[str, Any]) -> Any:
    """A pipeline with the peer's defaults, except that without prefix caching a prompt is one step."""
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = setup["cache_gib"]
    scheduler.enable_prefix_caching = setup["caching"]
    if not setup["caching"]:
        scheduler.max_num_batched_tokens = setup["length"]
        scheduler.dynamic_split_fuse = False
    device = {"INFERENCE_NUM_THREADS": setup["threads"], **setup.get("options", {})}
    if os.environ.get("ONEDNN_MAX_CPU_ISA") == "AVX2":  # it asks the processor, and oneDNN would refuse what it chooses
        device = {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 0, "INFERENCE_PRECISION_HINT": "f32"} | device
    return openvino_genai.ContinuousBatchingPipeline(setup["model"], scheduler, "CPU", device)


def greedy(new: int) -> Any:
    """Exactly `new` tokens."""
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = new
    config.ignore_eos = True
    config.do_sample = False
    return config


def load(setup: Mapping[str, Any]) -> tuple[Run, dict[str, str]]:
    """`options` are device properties."""
    made = pipeline(setup)
    count = 0

    def run(prompts: Sequence[Sequence[int]], new: int) -> Times:
        nonlocal count
        started = time.perf_counter()
        handles = []
        for prompt in prompts:
            ids = openvino.Tensor(numpy.asarray([prompt], dtype=numpy.int64))
            handles.append(made.add_request(count, ids, greedy(new)))
            count += 1
        times: list[list[float]] = [[] for _ in prompts]
        while made.has_non_finished_requests():
            made.step()
            now = time.perf_counter()
            for handle, found in zip(handles, times, strict=True):
                while handle.can_read():
                    found += [now] * sum(len(output.generated_ids) for output in handle.read().values())
        return started, times

    return run, {"version": openvino_genai.__version__, "kv": "uint8 (the peer's default)"}


if __name__ == "__main__":
    serve(load)
