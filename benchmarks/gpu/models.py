"""Whole models: decode beside the time of reading their weights, prompts beside matrix peak, and throughput."""

from __future__ import annotations

import time
from collections.abc import Iterator

from benchmarks.gpu.engines import ask, decode_seconds, decoding, prompt_seconds, running, stop_all, work_of
from benchmarks.gpu.measure import Figure, Setting
from benchmarks.gpu.shapes import config
from benchmarks.gpu.trace import by_kernel, traced
from penstock.engine.loop import Engine

PROMPT = 4096
ROWS = 256  # sequences in a step where throughput is measured
REQUESTS, INPUT, OUTPUT = 1000, 512, 256
SECONDS = 60  # after which throughput is that of what was done so far, its beginning left out
STEPS, KERNELS = 16, 8  # steps that are traced, and kernels that are named
LLAMA = "Llama-3.1-8B"


def llama_8b(setting: Setting) -> Iterator[Figure]:
    yield from _large(setting, None, 0.85, 9000.0)


def llama_8b_fp8(setting: Setting) -> Iterator[Figure]:
    yield from _large(setting, "fp8", 0.80, 14000.0)
    ours, other = setting.kept.get("throughput fp8"), setting.kept.get("throughput None")
    if ours and other:
        yield Figure("throughput, FP8 beside bf16", ours / other, "times", least=1.5)


def llama_8b_int4(setting: Setting) -> Iterator[Figure]:
    with running(setting, LLAMA, 16, 2048, quantize="int4") as engine:
        yield from _decode(setting, engine, LLAMA, (1, 16), 0.70, "int4")


def qwen3_0_6b(setting: Setting) -> Iterator[Figure]:
    yield from _small(setting, "Qwen3-0.6B", None)


def qwen3_30b_a3b(setting: Setting) -> Iterator[Figure]:
    yield from _small(setting, "Qwen3-30B-A3B", None)


def deepseek_v2_lite(setting: Setting) -> Iterator[Figure]:
    yield from _small(setting, "DeepSeek-V2-Lite", None)


def _small(setting: Setting, model: str, quantize: str | None) -> Iterator[Figure]:
    with running(setting, model, 64, 4352, quantize=quantize) as engine:
        yield from _decode(setting, engine, model, (1, 64), None)
        if not setting.tiny:
            yield from _prompt(setting, engine, model, None)


def _large(setting: Setting, quantize: str | None, share: float, tokens: float) -> Iterator[Figure]:
    with running(setting, LLAMA, ROWS, 4352, quantize=quantize, kv_blocks=_blocks(setting)) as engine:
        yield from _decode(setting, engine, LLAMA, (1, 64), share, quantize)
        yield from _prompt(setting, engine, LLAMA, 0.60 if quantize is None else None, quantize)
        yield from _throughput(setting, engine, quantize, tokens)


def _blocks(setting: Setting) -> int:
    """Of a cache for ROWS requests of throughput, or some long prompts."""
    return 20 if setting.tiny else 2000 if setting.compiling else ROWS * ((INPUT + OUTPUT) // 16 + 2)


def _decode(
    setting: Setting,
    engine: Engine,
    model: str,
    batches: tuple[int, ...],
    least: float | None,
    quantize: str | None = None,
) -> Iterator[Figure]:
    settings = config(model, setting.tiny)
    work = work_of(engine, settings)
    for batch in batches[: 1 if setting.tiny else None]:
        seconds = decode_seconds(setting, engine, batch, settings["vocab_size"])
        setting.kept[f"{model} decode {batch} {quantize}"] = seconds
        if batch == 1:
            share = setting.share(work.step_bytes / seconds, "read")
            note = f"{1 / seconds:.0f} tokens/s, {work.step_bytes / 2**30:.2f} GiB"
            of = "reading the weights"
            yield Figure(f"decode, {batch} row", seconds * 1e3, "ms", share, of, least, note=note)
            yield from _kernels(setting, engine, settings["vocab_size"])
        else:
            yield Figure(f"decode, {batch} rows", seconds * 1e3, "ms", note=f"{batch / seconds:,.0f} tokens/s")


def _kernels(setting: Setting, engine: Engine, vocabulary: int) -> Iterator[Figure]:
    """What takes the time of a step of one row."""
    with decoding(setting, engine, 1, vocabulary) as rows:
        found = by_kernel(traced(setting, engine, rows, STEPS), STEPS)
    for name, microseconds, count in found[:KERNELS]:
        yield Figure(f"of that, {name[:36]}", microseconds, "µs", note=f"{count:.0f} launches")


def _prompt(
    setting: Setting, engine: Engine, model: str, least: float | None, quantize: str | None = None
) -> Iterator[Figure]:
    settings = config(model, setting.tiny)
    length = 7 if setting.tiny else PROMPT
    seconds = prompt_seconds(setting, engine, length, settings["vocab_size"])
    setting.kept[f"{model} prompt {quantize}"] = seconds
    pairs = settings["num_hidden_layers"] * length**2 / 2
    attended = 4 * pairs * settings["num_attention_heads"] * settings.get("head_dim", settings.get("v_head_dim", 0))
    rate = (work_of(engine, settings).products * length + attended) / seconds
    share = setting.share(rate, "bf16")
    note = f"{length / seconds:,.0f} tokens/s, {rate / 1e12:.0f} TFLOP/s"
    yield Figure(f"prompt of {length}", seconds * 1e3, "ms", share, "bf16 peak", least, note=note)


def _throughput(setting: Setting, engine: Engine, quantize: str | None, least: float) -> Iterator[Figure]:
    """Requests all at once, as an offline batch; greedy, of fixed lengths."""
    requests, given, wanted = (2, 4, 2) if setting.tiny else (REQUESTS, INPUT, OUTPUT)
    if setting.compiling:
        requests, wanted = 40, 4
    vocabulary = config(LLAMA, setting.tiny)["vocab_size"]
    names = [f"request {number}" for number in range(requests)]
    for name in names:
        engine.add(ask(name, given, wanted, vocabulary))
    setting.synchronize()
    started = time.perf_counter()
    limit = min(SECONDS, max(5.0, setting.left))
    done: list[tuple[float, int]] = [(0.0, 0)]  # seconds, output tokens so far
    while engine.has_work and done[-1][0] < limit:
        count = sum(len(output.tokens) for output in engine.step())
        done.append((time.perf_counter() - started, done[-1][1] + count))
    whole = not engine.has_work
    begin = (0.0, 0) if whole else next(entry for entry in done if entry[0] >= 0.3 * limit)
    stop_all(engine, names)
    rate = (done[-1][1] - begin[1]) / (done[-1][0] - begin[0])
    setting.kept[f"throughput {quantize}"] = rate
    note = "" if whole else f"{done[-1][1]} of {requests * wanted} tokens; the time was over, the beginning is left out"
    name = f"throughput, {requests} × ({given} in, {wanted} out)"
    yield Figure(name, rate, "tokens/s", least=least, note=note)
