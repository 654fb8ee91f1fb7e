"""How often a drafter and its target draw the same token from shared randomness, and what a draw costs.

Two ways to share: one uniform number a position, with a walk through the distribution in order of token ids, and Gumbel
noise for each token with the largest log p + noise. Both ways' agreement is a closed form of the two distributions p
and q: the walk agrees where intervals of the same token overlap; the noise agrees on token j with probability
1 / Σ_i max(p_i / p_j, q_i / q_j). No way to draw agrees more often than Σ min(p, q) = 1 - TV; ways that do not look at
the other distribution are bounded by (1 - TV) / (1 + TV) in the worst case (Daliri et al., arXiv:2408.07978).

Distributions are those of the bundled chat model and of its published drafter (one layer), or of the chat model with
weights of fewer bits, at the positions of held-out dialogues, after temperature and top-p.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.report import arguments, report
from penstock.config.options import EngineOptions
from penstock.engine.text_pipeline import TextPipeline
from penstock.evaluate.scoring import Scorer, Window
from penstock.kernels.cpu.native import NativeSampling
from penstock.kernels.reference.noise import noise, scores
from penstock.kernels.reference.sampling import candidates
from penstock.kernels.sampling import RowSettings
from penstock.weights.writers.quantize import quantize_model

TARGET = "penstock-concierge"
SETTINGS = ((0.7, 1.0), (0.7, 0.95), (1.0, 1.0), (1.0, 0.95))
CONTEXT = 1024
VOCABULARY = 151_936
COLUMNS = ("draft", "temperature", "top-p", "best possible", "worst-case bound", "walk", "noise", "noise, drawn")
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]


def windows(data: Path, count: int) -> list[Window]:
    """The first dialogues, each a window of its own, all but the first tokens predicted."""
    pipeline = TextPipeline.load(TARGET)
    assert pipeline.template is not None, "the bundled model has a chat template"
    found = []
    for line in (data / "chat" / "sgd_dev_200.jsonl").read_text(encoding="utf-8").splitlines():
        said = json.loads(line)
        text = pipeline.template.render(said["messages"], tools=said["tools"], add_generation_prompt=False)
        ids = pipeline.tokenizer.encode(text)[-CONTEXT:]
        found.append(Window(tuple(ids), len(ids) // 2))
    return found[:count]


def predictions(model: str, stretches: list[Window]) -> Iterator[Floats]:
    """Logits of each position of the windows."""
    options = EngineOptions(model=model, device="cpu", threads=1, pack_cache="off")
    with closing(Scorer(options, CONTEXT)) as scorer:
        for window in stretches:
            for logits, _ in scorer.logits(window):
                yield from logits.numpy().copy()


def both(one: Floats, other: Floats, settings: RowSettings) -> tuple[Doubles, Doubles]:
    """Probabilities of all tokens under both."""
    out = []
    for logits in (one, other):
        p = np.zeros(len(logits))
        left = candidates(logits, settings)
        p[left.ids] = left.probabilities()
        out.append(p)
    return out[0], out[1]


def walk_agreement(p: Doubles, q: Doubles) -> float:
    """The probability that one uniform number falls into the same token's interval of both."""
    ends = np.minimum(np.cumsum(p), np.cumsum(q))
    begins = np.maximum(np.cumsum(p) - p, np.cumsum(q) - q)
    return float(np.maximum(ends - begins, 0.0).sum())


def noise_agreement(p: Doubles, q: Doubles) -> float:
    """Σ_j 1 / Σ_i max(p_i / p_j, q_i / q_j): by rising p_i / q_i, q counts before j and p from j on."""
    p, q = p[p + q > 0], q[p + q > 0]
    order = np.argsort(p / np.maximum(q, 1e-300), kind="stable")
    p, q = p[order], q[order]
    after, before = np.cumsum(p[::-1])[::-1], np.cumsum(q) - q
    shared = (p > 0) & (q > 0)
    return float((1.0 / (after[shared] / p[shared] + before[shared] / q[shared])).sum())


def drawn(logits: Floats, settings: RowSettings, position: int) -> int:
    """The token that noise draws."""
    left = candidates(logits, settings)
    return int(left.ids[np.argmax(scores(left.x, noise(7, 0, position, left.ids)))])


def agreement(target: list[Floats], draft: list[Floats], settings: RowSettings) -> dict[str, float]:
    """Means over positions."""
    found: dict[str, list[float]] = {name: [] for name in ("best", "bound", "walk", "noise", "drawn")}
    for position, (one, other) in enumerate(zip(target, draft, strict=True)):
        p, q = both(one, other, settings)
        overlap = float(np.minimum(p, q).sum())
        found["best"].append(overlap)
        found["bound"].append(overlap / (2.0 - overlap))
        found["walk"].append(walk_agreement(p, q))
        found["noise"].append(noise_agreement(p, q))
        found["drawn"].append(float(drawn(one, settings, position) == drawn(other, settings, position)))
    return {name: statistics.fmean(values) for name, values in found.items()}


def agreements(data: Path, dialogues: int, stride: int) -> list[dict[str, Any]]:
    """Every draft at every setting."""
    stretches = windows(data, dialogues)
    target = list(predictions(TARGET, stretches))[::stride]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        drafts = {"one layer": str(data / "models" / "penstock-concierge-draft")}
        for format in ("q4_0", "q2_k"):
            drafts[f"target in {format}"] = str(Path(folder) / f"{format}.gguf")
            quantize_model(TARGET, format, Path(drafts[f"target in {format}"]))
        for name, model in drafts.items():
            draft = list(predictions(model, stretches))[::stride]
            for temperature, top_p in SETTINGS:
                settings = RowSettings(len(target[0]), temperature=temperature, top_p=top_p)
                means = agreement(target, draft, settings)
                setting = {"draft": name, "temperature": temperature, "top_p": top_p, "positions": len(draft)}
                rows.append({**setting, **means})
    return rows


def costs(repeats: int) -> list[dict[str, Any]]:
    """Median microseconds of one row's draw, the whole chain, on one thread."""
    rng, kernel, found = np.random.default_rng(0), NativeSampling(), []
    shapes = {"peaked": 3.0, "wide": 1.0, "flat": 0.01}
    filters: dict[str, dict[str, Any]] = {
        "none": {}, "greedy": {"temperature": 0.0}, "top-k 50": {"top_k": 50}, "top-p 0.95": {"top_p": 0.95},
        "top-k 50, top-p 0.95": {"top_k": 50, "top_p": 0.95},
    }  # fmt: skip
    for shape, sigma in shapes.items():
        logits = (rng.standard_normal((8, VOCABULARY)) * sigma).astype(np.float32)
        for name, given in filters.items():
            row, times = kernel.row(RowSettings(VOCABULARY, seed=3, **given)), []
            for at in range(repeats):
                one = logits[at % 8 : at % 8 + 1]
                begin = time.perf_counter()
                kernel.sample(one, [row], np.array([at]))
                times.append(time.perf_counter() - begin)
            found.append({"logits": shape, "filters": name, "microseconds": statistics.median(times) * 1e6})
    return found


def main() -> None:
    """Prints both tables."""
    parser = arguments(__doc__)
    parser.add_argument("--dialogues", type=int, default=40)
    parser.add_argument("--stride", type=int, default=8, help="every so many positions is looked at")
    parser.add_argument("--repeats", type=int, default=100)
    given = parser.parse_args()
    found, cost = agreements(given.data, given.dialogues, given.stride), costs(given.repeats)
    names = ("draft", "temperature", "top_p", "best", "bound", "walk", "noise", "drawn")
    rows = [tuple(one[name] for name in names) for one in found]
    report("draws", given.results, {"agreement": found, "cost": cost}, COLUMNS, rows)
    for one in cost:
        print(f"{one['logits']}, filters {one['filters']}: {one['microseconds']:.0f} µs")


if __name__ == "__main__":
    main()
