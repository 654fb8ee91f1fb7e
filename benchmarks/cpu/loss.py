"""What every weight format and KV cache type costs in quality, and how llama.cpp computes the same files.

Three tables a model. Weights: each format `penstock quantize` writes, natively computed, against the original in exact
float32. KV cache: each type under the unquantised weights. llama.cpp: the same GGUF files under `llama-perplexity` with
its float16 KV cache and under Penstock with its own; both are held against the exact float32 computation of the same
decoded weights, so that a difference can be laid to the one or the other. Exact means Penstock's reference ops (torch,
float32 throughout, weights decoded at load).

llama.cpp gets its tokens, and the exact log-probabilities it compares itself with, in the file its option
`--kl-divergence-base` reads; so the tokens are the same ones by construction.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from torch import Tensor

from benchmarks.cpu.peer_install import Places
from benchmarks.cpu.peers import DEFAULT_ROOT
from benchmarks.report import arguments, markdown, report
from penstock.config.options import EngineOptions
from penstock.config.quantisation import GGUF_FILE_TYPES, QUANTIZE_FORMATS
from penstock.engine.text_pipeline import TextPipeline
from penstock.evaluate.scoring import Divergence, Perplexity, Scorer, Window, compare, halved_windows, perplexity
from penstock.kernels.api import KernelSet, resolve_kernels
from penstock.kernels.cache import KV_TYPES
from penstock.kernels.registry import KernelContext
from penstock.startup.engine_spec import EngineSpec
from penstock.weights.writers.quantize import quantize_model

_NEEDS_256 = re.compile(r"q\d_k|iq4_xs|tq\d_0")  # a block is 256 weights; narrower rows stay in another format
_LEVELS = 65535
_LLAMA_STEP = 1.5e-6  # nats: it prints divergences to six decimals

_LOSS = ("perplexity", "change %", "KL", "KL p99", "same top %")
WEIGHT_COLUMNS = ("model", "weights", "bits", *_LOSS, "KL of arithmetic")
KV_COLUMNS = ("model", "KV cache", *_LOSS, "kept finer")
_ENGINES = ("Penstock %", "llama.cpp %", "Penstock / llama.cpp %", "KL Penstock", "KL llama.cpp", "nearer")
LLAMA_COLUMNS = ("model", "weights", "exact", *_ENGINES)


@dataclass(frozen=True, slots=True)
class Subject:
    """A model and the text it is scored on.

    Attributes:
        name: for the tables.
        model: folder or bundled name.
        context: tokens of a window.
        windows: the text, second halves scored.
        formats: weight formats its rows can take.
    """

    name: str
    model: str
    context: int
    windows: list[Window]
    formats: tuple[str, ...]


@dataclass(slots=True)
class Recorded:
    """Logits kept, so that many models are compared with one run of the reference."""

    vocab_size: int
    found: dict[Window, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)

    def logits(self, window: Window) -> Iterator[tuple[Tensor, Tensor]]:
        """What was recorded of the window."""
        yield from self.found[window]


def subjects(data: Path, chunks: int) -> list[Subject]:
    """The bundled model on held-out dialogues with tools, and the story model on fairy tales."""
    concierge, stories = "penstock-concierge", data / "models" / "stories260K" / "hf"
    tales = (data / "text" / "grimms.txt").read_text(encoding="utf-8")
    narrow = tuple(name for name in QUANTIZE_FORMATS if not _NEEDS_256.match(name))
    return [
        Subject("concierge", concierge, 1024, _windows(concierge, dialogues(data), 1024, chunks), QUANTIZE_FORMATS),
        Subject("stories260K", str(stories), 512, _windows(str(stories), tales, 512, 2 * chunks), narrow),
    ]


def dialogues(data: Path) -> str:
    """The held-out dialogues one after the other, in the bundled model's chat template."""
    template = TextPipeline.load("penstock-concierge").template
    assert template is not None, "the bundled model has a chat template"
    lines = (data / "chat" / "sgd_dev_200.jsonl").read_text(encoding="utf-8").splitlines()
    said = [json.loads(line) for line in lines]
    return "".join(template.render(d["messages"], tools=d["tools"], add_generation_prompt=False) for d in said)


def _windows(model: str, text: str, context: int, chunks: int) -> list[Window]:
    tokenizer = TextPipeline.load(model).tokenizer
    ids = tokenizer.encode(text)
    begins = tokenizer.bos_id is not None and ids[:1] == [tokenizer.bos_id]
    return halved_windows(ids, context, tokenizer.bos_id if begins else None)[:chunks]


def exact(spec: EngineSpec) -> KernelSet:
    """The reference ops."""
    options = spec.options
    context = KernelContext(options.device, options.dtype, options.isa, options.kv_cache_dtype, prefer_reference=True)
    return resolve_kernels(context)


def load(
    subject: Subject, model: str, kv: str = "float32", kernels: Callable[[EngineSpec], KernelSet] | None = None
) -> Scorer:
    """A model in float32 on one thread, with that KV cache type."""
    settings: dict[str, Any] = {"dtype": "float32", "kv_cache_dtype": kv, "threads": 1, "pack_cache": "off"}
    return Scorer(EngineOptions(model=model, device="cpu", **settings), subject.context, kernels=kernels)


def record(subject: Subject, model: str) -> Recorded:
    """The exact computation of a model's decoded weights."""
    with closing(load(subject, model, kernels=exact)) as scorer:
        kept = Recorded(scorer.vocab_size)
        for window in subject.windows:
            kept.found[window] = [(logits.clone(), targets) for logits, targets in scorer.logits(window)]
        return kept


def _loss(own: Perplexity, original: Perplexity, far: Divergence) -> dict[str, Any]:
    return {
        "perplexity": own.value,
        "original": original.value,
        "ratio": own.value / original.value,
        "standard_error": own.error,
        "tokens": own.tokens,
        "divergence": asdict(far),
    }


def weight_loss(
    subject: Subject, format: str, original: Recorded, llama: Path | None, folder: Path
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Quantises the model and scores it.

    Args:
        original: the exact computation of the original.
        llama: llama-perplexity, None if it is not installed.
        folder: takes the files.

    Returns:
        The loss against the original, and for a GGUF file the comparison with llama.cpp.
    """
    path = folder / f"{subject.name}-{format}{'.gguf' if format in GGUF_FILE_TYPES else ''}"
    written = quantize_model(subject.model, format, path, force=True)
    decoded = record(subject, str(path))
    with closing(load(subject, str(path))) as scorer:
        loss = _loss(*compare(scorer, original, subject.windows))
        own, wanted, arithmetic = compare(scorer, decoded, subject.windows)
    weights = sum(written.formats.values())
    loss |= {"model": subject.name, "format": format, "bytes": weights, "formats": written.formats}
    loss |= {"bits": 8 * weights / _parameters(subject), "remarks": written.remarks}
    loss |= {"arithmetic": {"ratio": own.value / wanted.value, "divergence": asdict(arithmetic)}}
    if format not in GGUF_FILE_TYPES or llama is None:
        return loss, None
    return loss, beside_llama(subject, format, path, decoded, llama)


def _parameters(subject: Subject) -> int:
    from penstock.weights.facts import model_facts
    from penstock.weights.open import open_checkpoint

    return model_facts(open_checkpoint(subject.model)).parameters


def kv_loss(subject: Subject, kind: str, original: Recorded) -> dict[str, Any]:
    """The loss of a KV cache type under unquantised weights; layers the start-up probe kept finer are counted."""
    with closing(load(subject, subject.model, kind)) as scorer:
        loss = _loss(*compare(scorer, original, subject.windows))
        finer = sum(layer != kind for layer in scorer.kv_types)
        probe = next((note.reason for note in scorer.notes if note.name == "KV cache types"), "")
    return loss | {"model": subject.name, "kv": kind, "finer_layers": finer, "probe": probe}


def beside_llama(subject: Subject, format: str, path: Path, decoded: Recorded, llama: Path) -> dict[str, Any]:
    """One GGUF file under both engines, float16 KV caches, against the exact computation of its weights."""
    base = path.with_suffix(".base")
    with base.open("wb") as file:
        write_base(file, subject, decoded)
    command = [str(llama), "-m", str(path), "-c", str(subject.context), "-t", "1", "-tb", "1"]
    command += ["--kl-divergence", "--kl-divergence-base", str(base)]
    theirs = run_llama(command)
    base.unlink()
    with closing(load(subject, str(path), "float16")) as scorer:
        own, wanted, far = compare(scorer, decoded, subject.windows)
    row = {"model": subject.name, "format": format, "exact": wanted.value, "penstock": own.value}
    row |= {"penstock_divergence": far.mean, "penstock_same_top": far.same_top, "penstock_error": far.log_ratio_error}
    return row | theirs


def run_llama(command: Sequence[str], tries: int = 10) -> dict[str, Any]:
    """Runs llama-perplexity, again where its log ends early: at exit it drops lines that wait to be printed."""
    for _ in range(tries):
        ran = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=1800)
        found = read_llama(ran.stdout + ran.stderr)
        if "llama" in found or ran.returncode:
            break
    return found


def write_base(file: BinaryIO, subject: Subject, decoded: Recorded) -> None:
    """Writes what `llama-perplexity --kl-divergence-base` reads.

    Per scored token a row of 16-bit words: the float32 step and the float32 smallest log-probability, then the
    log-probabilities of the vocabulary (made even) in steps above the smallest.
    """
    windows = subject.windows
    file.write(b"_logits_")
    file.write(np.array([subject.context, decoded.vocab_size, len(windows)], np.int32).tobytes())
    file.write(np.array([window.tokens for window in windows], np.int32).tobytes())
    for window in windows:
        for logits, _ in decoded.logits(window):
            file.write(log_rows(logits.numpy()).tobytes())


def log_rows(logits: np.ndarray) -> np.ndarray:
    """[n, vocab] float32 → [n, 4 + vocab made even] uint16."""
    count, vocab = logits.shape
    largest, smallest = logits.max(1, keepdims=True), logits.min(1, keepdims=True)
    logsum = np.log(np.exp((logits - largest).astype(np.float64)).sum(1, keepdims=True))
    step = (largest - smallest) / np.float32(_LEVELS)
    rows = np.zeros((count, 4 + vocab + vocab % 2), np.uint16)
    rows[:, :2] = step.view(np.uint16)
    rows[:, 2:4] = (smallest - largest - logsum).astype(np.float32).view(np.uint16)
    levels = np.rint((logits - smallest) / np.maximum(step, np.finfo(np.float32).tiny))
    rows[:, 4 : 4 + vocab] = np.minimum(levels, _LEVELS)
    return rows


def read_llama(output: str) -> dict[str, Any]:
    """The figures llama-perplexity printed, or the end of what it said instead."""
    patterns = {
        "llama": r"Mean PPL\(Q\)\s*:\s*(\S+)",
        "llama_divergence": r"Mean\s+KLD:\s*(\S+)",
        "llama_error": r"Mean PPL\(Q\)/PPL\(base\)\s*:\s*\S+\s*±\s*(\S+)",
        "llama_same_top": r"Same top p:\s*(\S+)",
    }
    found = {name: re.search(pattern, output) for name, pattern in patterns.items()}
    figures = {name: float(match[1]) for name, match in found.items() if match is not None}
    if len(figures) < len(patterns):
        return {"llama_failed": output.strip()[-500:]}
    figures["llama_same_top"] /= 100
    return figures


def _percent(ratio: float, error: float) -> str:
    change = round(100 * (ratio - 1), 3) + 0.0  # no negative zero
    return f"{change:+.3f} ± {100 * error:.3f}"


def _milli(nats: float) -> str:
    """10⁻³ nats; three significant digits, and not more decimals than llama.cpp prints."""
    return f"{1000 * nats:.3f}" if nats < 0.01 else f"{1000 * nats:.3g}"


def loss_cells(row: dict[str, Any]) -> tuple[str, ...]:
    """Perplexity, its change, and the divergence, as the tables have them."""
    far = row["divergence"]
    change = _percent(row["ratio"], far["log_ratio_error"])
    return (
        f"{row['perplexity']:.3f}",
        change,
        _milli(far["mean"]),
        _milli(far["percentile_99"]),
        f"{100 * far['same_top']:.2f}",
    )


def weight_cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A line of the table of weights."""
    arithmetic = _milli(row["arithmetic"]["divergence"]["mean"])
    return (row["model"], row["format"], f"{row['bits']:.2f}", *loss_cells(row), arithmetic)


def kv_cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A line of the table of KV cache types."""
    return (row["model"], row["kv"], *loss_cells(row), f"{row['finer_layers']} layers" if row["finer_layers"] else "")


def llama_cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A line of the comparison."""
    start = (row["model"], row["format"], f"{row['exact']:.4f}")
    own = _percent(row["penstock"] / row["exact"], row["penstock_error"])
    if "llama" not in row:
        return (*start, own, "failed", "", _milli(row["penstock_divergence"]), "", "")
    mine, theirs = row["penstock_divergence"], row["llama_divergence"]
    nearer = "as near" if abs(mine - theirs) < _LLAMA_STEP else "Penstock" if mine < theirs else "llama.cpp"
    other = _percent(row["llama"] / row["exact"], row["llama_error"])
    ratio = f"{100 * (row['penstock'] / row['llama'] - 1):+.3f}"
    return (*start, own, other, ratio, _milli(mine), _milli(theirs), nearer)


def measure(subject: Subject, llama: Path | None, folder: Path) -> dict[str, Any]:
    """All three tables of one model."""
    original = record(subject, subject.model)
    weights, beside = [], []
    for format in subject.formats:
        loss, row = weight_loss(subject, format, original, llama, folder)
        print(*weight_cells(loss), *(llama_cells(row)[2:] if row else ()), flush=True)
        weights.append(loss)
        beside += [row] if row else []
    kv = [kv_loss(subject, kind, original) for kind in KV_TYPES]
    text = {"context": subject.context, "windows": len(subject.windows)}
    return text | {"exact": perplexity(original, subject.windows).value, "weights": weights, "kv": kv, "llama": beside}


def _joined(found: dict[str, Any], table: str, cells: Callable[[Any], tuple[str, ...]]) -> list[tuple[str, ...]]:
    return [cells(row) for of_model in found.values() for row in of_model[table]]


def main() -> None:
    """Measures both models and reports."""
    parser = arguments(__doc__)
    parser.add_argument("--chunks", type=int, default=16, help="windows of 1,024 tokens; twice as many of 512")
    parser.add_argument("--root", type=Path, default=DEFAULT_ROOT, help="folder of peers, where llama.cpp is built")
    given = parser.parse_args()
    program = Places(given.root).llama("llama-perplexity")
    llama = program if program.exists() else None
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for subject in subjects(given.data, given.chunks):
            found[subject.name] = measure(subject, llama, Path(folder))
    print(markdown(KV_COLUMNS, _joined(found, "kv", kv_cells)))
    print(markdown(LLAMA_COLUMNS, _joined(found, "llama", llama_cells)) if llama else f"{program} is not there.")
    report("cpu_loss", given.results, {"models": found}, WEIGHT_COLUMNS, _joined(found, "weights", weight_cells))


if __name__ == "__main__":
    main()
