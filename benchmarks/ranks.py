"""One model in several processes over one process with as many threads: python -m benchmarks.ranks --shape 1b --ranks 2

Both engines are there at once, each in a process of its own, and take turns, work by work. `--pipeline` deals layers
instead of sharing each. Prefixes are not cached, and answers are as long as is said: equal ones of a real model. Random
weights of a shape are each rank's own.
"""

from __future__ import annotations

import multiprocessing
import random
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.kv_tiers import SHAPES, dummy_model
from benchmarks.report import arguments, report
from penstock import LLM
from penstock.weights.open import bundled_model_path

Taken = dict[str, list[float]]  # seconds, by engine
WORKS = {  # sequences, tokens of a prompt and of an answer
    "decode, one sequence": (1, 16, 48),
    "prompt of 512 tokens": (1, 512, 1),
    "16 sequences": (16, 16, 24),
}
PARTS = ("ranks", "stages", "stages_computed")  # as in EngineStats
COLUMNS = [
    "work",
    "one process, tokens/s",
    "ranks, tokens/s",
    "ranks over one",
    "lowest, highest",
    "exchanges, % of a step",
]


def serve(pipe: Connection, settings: dict[str, Any]) -> None:
    """An engine that does works as it is told: sends the seconds each took and PARTS of it, and the answers."""
    with LLM(**settings) as llm:
        pipe.send({one.name: f"{one.value} {one.reason}" for one in llm.info.settings})
        while (work := pipe.recv()) is not None:
            prompts, tokens = work
            began, started = llm.stats(), time.perf_counter()
            answers = llm.generate(prompts, max_tokens=tokens, temperature=0, ignore_eos=True)
            seconds = time.perf_counter() - started
            ended = llm.stats()
            figures = {part: getattr(ended, f"{part}_seconds") - getattr(began, f"{part}_seconds") for part in PARTS}
            pipe.send(((seconds, figures), [answer.outputs[0].token_ids for answer in answers]))


class Engine:
    """One of them."""

    def __init__(self, life: Callable[[Connection, dict[str, Any]], None] = serve, **settings: Any) -> None:
        self._pipe, far = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(target=life, args=(far, settings))
        self._process.start()
        self.settings = self._pipe.recv()

    def run(self, prompts: list[list[int]], tokens: int) -> tuple[Any, list[tuple[int, ...]]]:
        """Seconds, and the answers."""
        self._pipe.send((prompts, tokens))
        found: tuple[Any, list[tuple[int, ...]]] = self._pipe.recv()
        return found

    def close(self) -> None:
        """Ends it."""
        self._pipe.send(None)
        self._process.join()


def measure(given: Any, model: Path) -> dict[str, Any]:
    """Seconds of each work by engine, round by round, and the share of exchanges in those of ranks."""
    settings: dict[str, Any] = {
        "model": str(model),
        "device": "cpu",
        "threads": given.threads,
        "max_model_len": 768,
        "max_num_seqs": 16,
        "kv_blocks": 400,
        "enable_prefix_caching": False,
        "load_format": "dummy" if given.shape else "auto",
        "quantize": given.quantize,
        "pack_cache": "off",
    }
    kind = "pipeline_parallel_size" if given.pipeline else "tensor_parallel_size"
    engines = {"one process": Engine(**settings), "ranks": Engine(**settings, **{kind: given.ranks})}
    seconds, shares = defaultdict[str, Taken](lambda: defaultdict(list)), defaultdict[str, list[float]](list)
    for name, which, took, figures in turns(engines, given.rounds, same=not given.shape):
        seconds[name][which].append(took)
        if which == "ranks":
            shares[name].append(figures["ranks"] / took)
    told = {name: engine.settings for name, engine in engines.items()}
    for engine in engines.values():
        engine.close()
    return {"seconds": seconds, "exchanged": shares, "settings": told}


def turns(
    engines: Mapping[str, Engine], rounds: int, *, same: bool
) -> Iterator[tuple[str, str, float, Mapping[str, float]]]:
    """Has two engines take turns: which work, by which, the seconds it took, and PARTS. The first round warms up.

    `same`: their answers have to be the same.
    """
    rng = random.Random(1)
    for turn in range(rounds + 1):
        for name, (count, length, tokens) in WORKS.items():
            prompts = [[rng.randrange(5, 30_000) for _ in range(length)] for _ in range(count)]
            answers = []
            for which in rng.sample(list(engines), len(engines)):
                (took, figures), said = engines[which].run(prompts, tokens)
                answers.append(said)
                if turn:
                    yield name, which, took, figures
            assert not same or answers[0] == answers[1], f"{name}: answers differ"


def random_model(folder: Path, shape: str) -> Path:
    """A model of that shape without weights, with a tokenizer: any will do."""
    model = dummy_model(folder, shape)
    for file in bundled_model_path().glob("tokenizer*.json"):
        shutil.copy(file, model)
    return model


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights; else --model")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--quantize", default=None)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2, help="of one process, and of all ranks together")
    parser.add_argument("--pipeline", action="store_true", help="deal layers")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(Path(folder) / "model", given.shape) if given.shape else given.model
        figures = measure(given, model)
    rows = []
    for name, (count, length, tokens) in WORKS.items():
        taken = figures["seconds"][name]
        ratios = sorted(one / ranks for one, ranks in zip(taken["one process"], taken["ranks"], strict=True))
        done = count * (length if tokens == 1 else tokens)
        speeds = [done / statistics.median(taken[engine]) for engine in ("one process", "ranks")]
        exchanged = 100 * statistics.median(figures["exchanged"][name])
        rows.append([name, *speeds, statistics.median(ratios), f"{ratios[0]:.2f}, {ratios[-1]:.2f}", exchanged])
    kind = "pipeline" if given.pipeline else "tensor"
    report(f"ranks_{kind}_{given.shape or Path(given.model).stem}", given.results, figures, COLUMNS, rows)


if __name__ == "__main__":
    main()
