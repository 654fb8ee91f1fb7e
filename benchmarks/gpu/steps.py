"""What happens between steps, and what one order of sums costs."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.gpu.engines import ask, decode_seconds, decoding, prompt_seconds, running, stop_all
from benchmarks.gpu.measure import Figure, Setting
from benchmarks.gpu.shapes import config
from benchmarks.gpu.trace import GAP, Launch, idle_share, traced
from penstock.config.sampling import SamplingParams
from penstock.core.request import EngineRequest
from penstock.engine.loop import Engine

SMALL, LARGE = "Llama-3.2-1B", "Llama-3.1-8B"
BATCH, STEPS, PROMPT = 64, 24, 4096
COMPANIES = (1, 7, 63)  # other rows
TOKENS = 12


def overlap(setting: Setting) -> Iterator[Figure]:
    """A step planned while the one before runs, and not: a 1B model, 64 rows."""
    vocabulary = config(SMALL, setting.tiny)["vocab_size"]
    seconds: dict[int, float] = {}
    for depth in (1, 0):
        with running(setting, SMALL, BATCH, 2048, depth=depth) as engine:
            seconds[depth] = decode_seconds(setting, engine, BATCH, vocabulary, 256)
            yield Figure(f"step of {BATCH} rows, depth {depth}", seconds[depth] * 1e3, "ms")
            if depth:
                with decoding(setting, engine, BATCH, vocabulary, 256) as rows:
                    launches = traced(setting, engine, rows, STEPS)
                if launches:
                    yield _idle(launches)
    yield Figure("overlap, off beside on", seconds[0] / seconds[1], "times", least=1.1)


def _idle(launches: list[Launch]) -> Figure:
    """Of the time of some steps, what lies in gaps between kernels; a profiler's work widens them."""
    idle, busy = idle_share(launches)
    return Figure("device idle between steps", 100 * idle, "%", most=2.0, note=f"gaps over {GAP:g} µs; busy {busy:.1%}")


def invariance(setting: Setting) -> Iterator[Figure]:
    """One order of sums: the same bits alone and in company, and what that costs."""
    settings = config(LARGE, setting.tiny)
    vocabulary, length = settings["vocab_size"], 7 if setting.tiny else PROMPT
    plain = setting.kept.get(f"{LARGE} decode 64 None"), setting.kept.get(f"{LARGE} prompt None")
    if None in plain:
        with running(setting, LARGE, BATCH, 4352) as engine:
            plain = (
                decode_seconds(setting, engine, BATCH, vocabulary),
                prompt_seconds(setting, engine, length, vocabulary),
            )
    with running(setting, LARGE, BATCH, 4352, batch_invariant=True) as engine:
        alone = _answer(setting, engine, 0, vocabulary)
        differ = [others + 1 for others in COMPANIES if _answer(setting, engine, others, vocabulary) != alone]
        batches = ", ".join(str(others + 1) for others in COMPANIES)
        note = f"batches {batches}; log-probabilities to the bit" + (f"; differ: {differ}" if differ else "")
        yield Figure("batches whose answer differs from batch 1", len(differ), "", most=0, note=note)
        fixed = (
            decode_seconds(setting, engine, BATCH, vocabulary),
            prompt_seconds(setting, engine, length, vocabulary),
        )
    for name, own, other in zip((f"decode, {BATCH} rows", f"prompt of {length}"), fixed, plain, strict=True):
        yield Figure(f"cost of one order of sums, {name}", own / (other or own) - 1, "", most=0.15)


def _answer(setting: Setting, engine: Engine, others: int, vocabulary: int) -> list[object]:
    """Tokens and log-probabilities of one request among others of other lengths."""
    count, tokens, length = (min(others, 1), 2, 5) if setting.tiny else (others, TOKENS, 100)
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, logprobs=5, ignore_eos=True)
    engine.add(EngineRequest("it", ask("it", length, 1, vocabulary).prompt_ids, sampling))
    names = [f"other {number}" for number in range(count)]
    for number, name in enumerate(names):
        engine.add(ask(name, length + 3 * number, 4 * tokens, vocabulary))
    found: list[object] = []
    ended = False
    while not ended:
        for output in engine.step():
            if output.request_id == "it":
                found += [output.tokens, output.logprobs]
                ended = output.finish_reason is not None
    stop_all(engine, names)
    return found
