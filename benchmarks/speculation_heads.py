"""Tokens that a target's step brings with each of its heads, beside what those who trained them measured.

python -m benchmarks.speculation MODEL --part heads     with MODEL-eagle3, -mtp, -medusa, -p-eagle beside MODEL
python -m benchmarks.speculation MODEL --part gain      time, with those and MODEL-draft, depths as the engine chooses

One turn of each dialogue is answered with each number of drafts, greedily and at temperature 1. What a turn's tokens
bring is counted, not timed: the first token of an answer comes with its prompt, and each further step brings one token
and the drafts that are accepted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from benchmarks.bounds import lower_bound
from penstock.config.options import EngineOptions
from penstock.config.sampling import SamplingParams
from penstock.core.request import EngineRequest
from penstock.engine.build import build_engine
from penstock.engine.loop import Engine
from penstock.engine.text_pipeline import TextPipeline

HEADS: Mapping[str, tuple[int, ...]] = {
    "eagle3": (1, 3, 5, 7),
    "mtp": (1, 3, 5, 7),
    "medusa": (1, 2, 3, 4),
    "p-eagle": (1, 3, 5, 7),
}
TEMPERATURES = (0.0, 1.0)
LENGTH, ANSWER = 2048, 64
GREEDY = SamplingParams(max_tokens=ANSWER, temperature=0.0)
Answers = dict[tuple[int, float], list[int]]
"""By number of the dialogue and temperature."""
GAINING: Mapping[str, Mapping[str, Any]] = {
    "draft_model": {"num_speculative_tokens": 4},
    "eagle3": {"num_speculative_tokens": 5},
    "mtp": {"num_speculative_tokens": 5},
    "medusa": {"num_speculative_tokens": 4},
    "p-eagle": {"num_speculative_tokens": 5},
}
GAIN_COLUMNS = ["drafts", "off, tokens/s", "gain, median", "lower 95 % bound of the mean", "tokens a step"]
COLUMNS = ["head", "drafts", "greedy, tokens a step", "as was measured for it", "temperature 1, tokens a step"]


@dataclass
class Counted:
    """Tokens behind the first of answers, and the steps that brought them."""

    tokens: int = 0
    steps: int = 0

    @property
    def rate(self) -> float:
        return self.tokens / self.steps


def turns(text: TextPipeline, data: Path) -> Iterator[list[int]]:
    """A prompt of each dialogue, up to the reply in its middle, if it fits."""
    assert text.template is not None
    with (data / "chat" / "sgd_dev_200.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            said = json.loads(line)
            replies = [at for at, one in enumerate(said["messages"]) if one["role"] == "assistant"]
            messages = said["messages"][: replies[len(replies) // 2]]
            prompt = text.tokenizer.encode(text.template.render(messages, tools=said["tools"]))
            if len(prompt) + ANSWER <= LENGTH:
                yield prompt


def answered(engine: Engine, request: EngineRequest) -> tuple[list[int], int]:
    """Its tokens, and the steps that were taken."""
    before, tokens = engine.stats().steps, list[int]()
    engine.add(request)
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            tokens += output.tokens
    return tokens, engine.stats().steps - before


def measure_head(
    model: Path,
    kind: str,
    prompts: Sequence[list[int]],
    eos: tuple[int, ...],
    truth: Answers,
) -> dict[float, dict[int, Counted]]:
    """By temperature and number of drafts; answers are compared with those of the head before, or of none."""
    most = max(HEADS[kind])
    config = {"method": kind, "model": f"{model}-{kind}", "num_speculative_tokens": most, "adaptive": False}
    options = EngineOptions(str(model), max_num_seqs=1, max_model_len=LENGTH, speculative_config=json.dumps(config))
    engine, _ = build_engine(options)
    found = {temperature: {depth: Counted() for depth in HEADS[kind]} for temperature in TEMPERATURES}
    for number, prompt in enumerate(prompts):
        first = EngineRequest(f"{number}", tuple(prompt), SamplingParams(max_tokens=1, temperature=0.0), speculate=most)
        answered(engine, first)  # so that each of the next finds all of the prompt but one token
        for temperature, depths in found.items():
            params = SamplingParams(max_tokens=ANSWER, temperature=temperature)
            for depth, counted in depths.items():
                name = f"{number}.{temperature}.{depth}"
                request = EngineRequest(name, tuple(prompt), params, eos, seed=number, speculate=depth)
                tokens, steps = answered(engine, request)
                assert tokens == truth.setdefault((number, temperature), tokens), (kind, number, temperature, depth)
                counted.tokens += len(tokens) - 1
                counted.steps += steps - 1
    engine.close()
    return found


def measure_heads(model: str, data: Path) -> tuple[dict[str, Any], list[list[object]]]:
    """The figures of each head, and the table's rows."""
    text = TextPipeline.load(model)
    prompts = list(turns(text, data))
    plain, _ = build_engine(EngineOptions(model, max_num_seqs=1, max_model_len=LENGTH))
    truth: Answers = {}
    for number, prompt in enumerate(prompts):
        for temperature in TEMPERATURES:
            params = SamplingParams(max_tokens=ANSWER, temperature=temperature)
            request = EngineRequest(f"{number}.{temperature}", tuple(prompt), params, text.eos_ids, seed=number)
            truth[number, temperature] = answered(plain, request)[0]
    plain.close()
    figures: dict[str, Any] = {"dialogues": len(prompts), "tokens": sum(map(len, truth.values())), "heads": {}}
    rows: list[list[object]] = []
    for kind in HEADS:
        found = measure_head(Path(model), kind, prompts, text.eos_ids, truth)
        told = json.loads((Path(f"{model}-{kind}") / "drafts.json").read_text(encoding="utf-8"))["measured"]
        theirs = told["mean_tokens_a_target_step"]
        greedy, sampled = (found[temperature] for temperature in TEMPERATURES)
        figures["heads"][kind] = {
            "greedy": {depth: one.rate for depth, one in greedy.items()},
            "temperature 1": {depth: one.rate for depth, one in sampled.items()},
            "as was measured for it": theirs,
        }
        rows += [[kind, depth, greedy[depth].rate, theirs[f"{depth}"], sampled[depth].rate] for depth in greedy]
    return figures, rows


def measure_gain(model: str, data: Path, rounds: int, dialogues: int) -> tuple[dict[str, Any], list[list[object]]]:
    """Seconds of decoding, one sequence at a time, in turns with an engine without drafts; prompts are found cached."""
    text = TextPipeline.load(model)
    prompts = list(turns(text, data))[:dialogues]
    engines: dict[str, Engine] = {}
    for kind in ("off", *GAINING):
        folder = f"{model}-{'draft' if kind == 'draft_model' else kind}"
        config = None if kind == "off" else json.dumps({"method": kind, "model": folder, **GAINING[kind]})
        options = EngineOptions(model, max_num_seqs=1, max_model_len=LENGTH, speculative_config=config)
        engines[kind], _ = build_engine(options)
    took: dict[str, list[float]] = {kind: [] for kind in engines}
    counted = {kind: Counted() for kind in engines}
    for turn in range(rounds + 1):  # the first is warm-up
        for kind, engine in engines.items() if turn % 2 else reversed(engines.items()):
            seconds = 0.0
            for number, prompt in enumerate(prompts):
                request = EngineRequest(f"{turn}.{number}", tuple(prompt), GREEDY, text.eos_ids, speculate=12)
                one, steps = _decoded(engine, request)
                seconds += one
                counted[kind].tokens += steps.tokens
                counted[kind].steps += steps.steps
            took[kind] += [seconds] if turn else []
    for engine in engines.values():
        engine.close()
    speed = counted["off"].tokens / (rounds + 1) / median(took["off"])
    figures: dict[str, Any] = {"dialogues": len(prompts), "off_tokens_per_s": speed, "found": {}}
    rows: list[list[object]] = []
    for kind in GAINING:
        gains = [off / one for off, one in zip(took["off"], took[kind], strict=True)]
        found = {"pairs": gains, "median": median(gains), "bound": lower_bound(gains)}
        figures["found"][kind] = {**found, "tokens_a_step": counted[kind].rate}
        rows.append([kind, speed, found["median"], found["bound"], counted[kind].rate])
    return figures, rows


def _decoded(engine: Engine, request: EngineRequest) -> tuple[float, Counted]:
    """Seconds from the first token on, the tokens behind it and their steps."""
    before, begun, tokens, first = engine.stats().steps, 0.0, 0, 0
    engine.add(request)
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            tokens += len(output.tokens)
        if tokens and not begun:
            begun, first = perf_counter(), tokens
            before = engine.stats().steps
    return perf_counter() - begun, Counted(tokens - first, engine.stats().steps - before)
