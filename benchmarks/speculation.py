"""What drafts that need no weights bring: answers are recorded texts, steps are a real shape's.

python -m benchmarks.speculation MODEL --part copying     one sequence that copies: an edited file, records, quotes
python -m benchmarks.speculation MODEL --part heads       what heads beside the model bring (speculation_heads)
python -m benchmarks.speculation MODEL --part gain        and what time they save
python -m benchmarks.speculation MODEL --part load        1 to 64 sequences that copy little, drafts on over off

A model with random weights says nothing that could be copied. So its steps are computed as they are, sampling included,
and what was drawn is then replaced by the next token of a recorded answer: acceptance is that of the text, time that of
the model. Engines with and without drafts take turns. Beside the speed stands what the measured cost of a step by its
tokens and the text's acceptance allow: each step as long as what would be accepted, and not longer.
"""

from __future__ import annotations

import gzip
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.bounds import lower_bound
from benchmarks.report import arguments, report
from benchmarks.speculation_heads import COLUMNS, GAIN_COLUMNS, measure_gain, measure_heads
from penstock.config.options import EngineOptions
from penstock.config.sampling import SamplingParams
from penstock.core.protocol import NewSequence
from penstock.core.request import EngineRequest
from penstock.engine.build import build_engine
from penstock.engine.loop import Engine
from penstock.engine.text_pipeline import TextPipeline
from penstock.runtime.drafters.drafter import Draft, Drafter, NoDrafter
from penstock.runtime.drafters.lookup import NgramDrafter, SuffixDrafter

METHODS: Mapping[str, str | None] = {
    "off": None,
    "suffix": '{"method": "suffix"}',
    "ngram": '{"method": "ngram"}',
}
DRAFTERS: Mapping[str, Callable[[], Drafter]] = {
    "suffix": lambda: SuffixDrafter(12, 2),
    "ngram": lambda: NgramDrafter(12, 2, 4),
}
_BLOCK = 16
FIXED = {f"suffix, always {depth}": depth for depth in (1, 3, 7)}
Script = tuple[list[int], list[int]]
"""A prompt and its answer, in tokens."""


@dataclass(frozen=True)
class Load:
    """What is measured under load: rounds, tokens of prompts and answers, methods, and whether fixed depths too."""

    sequences: Sequence[int]
    rounds: int
    prompt: int
    tokens: int
    methods: Sequence[str]
    fixed: bool


@dataclass
class Scripted:
    """A sampler that draws, and then says what was recorded."""

    inner: Any
    scripts: dict[str, Script] = field(default_factory=dict)
    slots: dict[int, Script] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def add_row(self, new: NewSequence) -> None:
        self.slots[new.slot] = self.scripts[new.request_id]
        self.inner.add_row(new)

    def begin(self, logits: Any, draws: Any, masks: Any = None, followers: Any = ()) -> Any:
        samples = self.inner.begin(logits, draws, masks, followers).wait()
        said = [self.said(draw.slot, draw.position, draw.drafts) for draw in draws]
        return _Waited([sample._replace(tokens=tokens) for sample, tokens in zip(samples, said, strict=True)])

    def draw(self, logits: Any, slots: Any, positions: Any, masks: Any = None) -> list[Any]:
        samples = self.inner.draw(logits, slots, positions, masks)
        said = [self.said(slot, position, ()) for slot, position in zip(slots, positions, strict=True)]
        return [sample._replace(tokens=tokens) for sample, tokens in zip(samples, said, strict=True)]

    def said(self, slot: int, position: int, drafts: Sequence[int]) -> tuple[int, ...]:
        prompt, answer = self.slots[slot]
        at = position - len(prompt)
        tokens: list[int] = []
        for draft in drafts:
            if at + len(tokens) + 1 >= len(answer) or answer[at + len(tokens)] != draft:
                break
            tokens.append(draft)
        return (*tokens, answer[at + len(tokens)])


@dataclass
class _Waited:
    samples: list[Any]
    last: None = None

    def wait(self) -> list[Any]:
        return self.samples


class Right(NoDrafter):
    """Drafts so many tokens each time, all of which are right: what steps of that many cost."""

    def __init__(self, script: Script, most: int) -> None:
        self._answer, self.most, self._said = script[1], most, 0

    def begin(self, new: NewSequence) -> None:
        self._said = len(new.generated_ids)

    def take(self, slot: int, tokens: Sequence[int]) -> None:
        self._said += len(tokens)

    def propose(self, wanted: Mapping[int, int]) -> Sequence[Draft]:
        coming = tuple(self._answer[self._said : self._said + self.most])
        return [Draft(slot, coming) for slot in wanted] if len(coming) == self.most else []


def made(model: str, config: str | None, sequences: int, length: int, drafter: Any = None) -> tuple[Engine, Scripted]:
    blocks = sequences * (length // _BLOCK + 2) + 1  # room for all at once: nobody waits or is preempted
    options = EngineOptions(
        model, speculative_config=config, max_num_seqs=sequences, max_model_len=length, block_size=_BLOCK,
        kv_blocks=blocks,
    )  # fmt: skip
    engine, _ = build_engine(options, drafter=drafter)
    runner: Any = engine.runner
    scripted = Scripted(runner._sampler)
    runner._sampler = scripted
    if runner._decoding is not None:
        runner._decoding._sampler = scripted
    return engine, scripted


def answer(engine: Engine, scripted: Scripted, scripts: Sequence[Script], name: str, drafts: int) -> float:
    """Seconds of decoding: from the last first token to the last one."""
    for number, script in enumerate(scripts):
        scripted.scripts[f"{name}{number}"] = script
        params = SamplingParams(temperature=0.0, max_tokens=len(script[1]), ignore_eos=True)
        engine.add(EngineRequest(f"{name}{number}", tuple(script[0]), params, speculate=drafts))
    begun, started, said = 0.0, set[str](), {f"{name}{number}": list[int]() for number in range(len(scripts))}
    while engine.has_work:
        for output in engine.step():
            said[output.request_id] += output.tokens
            started.add(output.request_id)
        begun = begun or (perf_counter() if len(started) == len(scripts) else 0.0)
    seconds = perf_counter() - begun
    assert all(said[f"{name}{number}"] == script[1] for number, script in enumerate(scripts))
    return seconds


def forget(engine: Engine) -> None:
    """Keeps a sequence's answer from those after it, which are the same: suffixes would know all of it."""
    runner: Any = engine.runner
    drafter = runner._drafting._drafter
    if isinstance(drafter, SuffixDrafter):
        drafter._whose.clear()


def copying(text: TextPipeline, data: Path) -> dict[str, Script]:
    """The recorded texts: a file with names changed, records as JSON, sentences that are quoted."""
    with gzip.open(data / "eval" / "humaneval" / "HumanEval.jsonl.gz", "rt", encoding="utf-8") as lines:
        tasks = [json.loads(line) for line in lines][:6]
    code = "\n".join(task["prompt"] + task["canonical_solution"] for task in tasks)
    edited = code.replace("numbers", "values").replace("string", "text").replace("threshold", "limit")
    names = (
        "Ashbourne",
        "Bellerive",
        "Calder House",
        "Dunmore",
        "Elm Court",
        "Farthing Inn",
        "Greystones",
        "Harbour View",
    )
    records = [
        {"name": name, "rooms": 7 * number + 5, "stars": number % 5 + 1, "phone": f"0{number}32 55{number}{number}81",
         "address": f"{number * 13 + 4} {name.split()[0]} Road", "has_pool": number % 2 == 0}
        for number, name in enumerate(names)
    ]  # fmt: skip
    table = "\n".join("; ".join(f"{key}: {value}" for key, value in record.items()) for record in records)
    wiki = (data / "text" / "wiki.test.raw").read_text(encoding="utf-8")
    passage = [line.strip() for line in wiki.splitlines() if len(line) > 600][3:6]
    sentences = [part.strip() for line in passage for part in line.split(" . ") if len(part) > 80]
    quoted = "\n".join(f'{number}. The passage says: "{part}"' for number, part in enumerate(sentences[::3], 1))
    asked = {
        "an edited file": (f"Rename the variables in this file.\n{code}\nThe new file:\n", edited),
        "records as JSON": (f"Write these records as JSON.\n{table}\nJSON:\n", json.dumps(records, indent=1)),
        "quotes": ("\n".join(passage) + "\nWhat does the passage say? Quote it.\n", quoted),
    }
    encode = text.tokenizer.encode
    return {name: (encode(prompt), encode(said)[:240]) for name, (prompt, said) in asked.items()}


def step_costs(model: str, script: Script, length: int) -> list[float]:
    """Seconds of a step of 1, 2 … 13 tokens of one sequence; those between what is measured are interpolated."""
    depths = (0, 1, 3, 7, 12)
    took: dict[int, list[float]] = {depth: [] for depth in depths}
    drafter = Right(script, max(depths))
    engine, scripted = made(model, None, 1, length, drafter)
    for turn in range(3):  # the first is warm-up
        for depth in depths:
            drafter.most, before = depth, engine.stats().steps
            seconds = answer(engine, scripted, [script], f"c{turn}.{depth}.", depth)
            took[depth] += [seconds / (engine.stats().steps - before - 1)] if turn else []
    engine.close()
    measured = {depth + 1: min(each) for depth, each in took.items()}
    known = sorted(measured)
    costs = []
    for tokens in range(1, known[-1] + 1):
        low = max(one for one in known if one <= tokens)
        high = min(one for one in known if one >= tokens)
        share = (tokens - low) / (high - low) if high > low else 0.0
        costs.append(measured[low] + share * (measured[high] - measured[low]))
    return costs


def allowed(drafter: Drafter, script: Script, costs: Sequence[float]) -> float:
    """Seconds if each step verified just what would be accepted of its drafter's proposal."""
    prompt, said = script
    drafter.begin(NewSequence(0, "", 0, tuple(prompt), (said[0],), 0, ((),), SamplingParams()))
    at, seconds = 1, 0.0
    while at < len(said):
        drafts = next((draft.tokens for draft in drafter.propose({0: len(costs) - 1})), ())
        right = 0
        while right < len(drafts) and at + right + 1 < len(said) and said[at + right] == drafts[right]:
            right += 1
        seconds += costs[right]
        drafter.take(0, said[at : at + right + 1])
        at += right + 1
    drafter.release(0)
    return seconds


def measure_copying(model: str, data: Path, rounds: int) -> tuple[dict[str, Any], list[list[object]]]:
    text = TextPipeline.load(model)
    scripts = copying(text, data)
    length = max(len(prompt) + len(said) for prompt, said in scripts.values()) + 32
    costs = step_costs(model, max(scripts.values(), key=lambda script: len(script[1])), length)
    engines = {name: made(model, config, 1, length) for name, config in METHODS.items()}
    for turn, (engine, scripted) in enumerate(engines.values()):  # what is learned first is learned of another text
        for number, script in enumerate(scripts.values()):
            answer(engine, scripted, [script], f"w{turn}.{number}.", 12)
            forget(engine)
    figures: dict[str, Any] = {"step_seconds_by_tokens": costs, "works": {}}
    rows: list[list[object]] = []
    for name, script in scripts.items():
        took: dict[str, list[float]] = {method: [] for method in METHODS}
        for turn in range(rounds):
            for method, (engine, scripted) in engines.items():
                took[method].append(answer(engine, scripted, [script], f"{name}{turn}", 12))
                forget(engine)
        off = statistics.median(took["off"])
        found: dict[str, Any] = {"tokens": len(script[1]), "off_tokens_per_s": (len(script[1]) - 1) / off}
        for method in ("suffix", "ngram"):
            gain = statistics.median(a / b for a, b in zip(took["off"], took[method], strict=True))
            possible = (len(script[1]) - 1) * costs[0] / allowed(DRAFTERS[method](), script, costs)
            found[method] = {"gain": gain, "allowed": possible, "share": gain / possible}
            rows.append([name, method, (len(script[1]) - 1) / off, gain, possible, gain / possible])
        figures["works"][name] = found
    for engine, _ in engines.values():
        engine.close()
    return figures, rows


def measure_load(model: str, data: Path, asked: Load) -> tuple[dict[str, Any], list[list[object]]]:
    """Dialogues that quote little of themselves, by how many there are at once.

    Those of one load are the same in every round, so that prompts come from the prefix cache; engines take turns in an
    order that is turned round each time.
    """
    text = TextPipeline.load(model)
    with (data / "chat" / "sgd_dev_200.jsonl").open(encoding="utf-8") as lines:
        talks = ["\n".join(str(one.get("content") or "") for one in json.loads(line)["messages"]) for line in lines]
    tokens = asked.tokens
    coded = [text.tokenizer.encode(talk) for talk in talks]
    scripts = [(ids[: asked.prompt], ids[asked.prompt :][:tokens]) for ids in coded if len(ids) > asked.prompt + tokens]
    length = asked.prompt + tokens + 16
    configs = {name: METHODS[name] for name in ("off", *asked.methods)}
    for name, depth in FIXED.items() if asked.fixed else ():
        configs[name] = json.dumps({"method": "suffix", "num_speculative_tokens": depth, "adaptive": False})
    engines = {name: made(model, config, max(asked.sequences), length) for name, config in configs.items()}
    figures: dict[str, Any] = {"loads": {}}
    rows: list[list[object]] = []
    for count in asked.sequences:
        took: dict[str, list[float]] = {name: [] for name in configs}
        chosen = [scripts[number % len(scripts)] for number in range(count)]
        for turn in range(asked.rounds + 1):
            for name in configs if turn % 2 else reversed(configs):
                engine, scripted = engines[name]
                seconds = answer(engine, scripted, chosen, f"{count}.{turn}.", 12)
                forget(engine)
                if turn:  # the first is warm-up
                    took[name].append(seconds)
        found: dict[str, Any] = {"off_s": took["off"]}
        fixed = 1.0
        for name, each in took.items():
            gains = [a / b for a, b in zip(took["off"], each, strict=True)]
            counted = engines[name][0].stats()
            decisions = dict(counted.draft_decisions)
            found[name] = {"pairs": gains, "median": statistics.median(gains), "bound": lower_bound(gains)}
            found[name] |= {"drafted": counted.drafted_tokens, "decisions": decisions}
            fixed = max(fixed, found[name]["median"]) if name in FIXED else fixed
        figures["loads"][count] = found
        for name in asked.methods:
            one = found[name]
            rows.append([count, name, one["median"], one["bound"], one["median"] / fixed])
    for engine, _ in engines.values():
        engine.close()
    return figures, rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("model", help="a model with a tokenizer, such as those of benchmarks.cpu.peers")
    parser.add_argument("--part", choices=("copying", "heads", "gain", "load"), default="copying")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--tokens", type=int, default=48, help="of an answer, under load")
    parser.add_argument("--prompt", type=int, default=96, help="tokens of a prompt, under load")
    parser.add_argument("--methods", nargs="+", choices=("suffix", "ngram"), default=["suffix"], help="under load")
    parser.add_argument("--dialogues", type=int, default=20, help="for --part gain")
    parser.add_argument("--fixed", action="store_true", help="beside fixed depths, under load")
    args = parser.parse_args()
    shape = Path(args.model).stem
    if args.part == "copying":
        figures, rows = measure_copying(args.model, args.data, args.rounds)
        columns = ["text", "drafts", "off, tokens/s", "gain", "allowed", "share of it"]
    elif args.part == "heads":
        figures, rows = measure_heads(args.model, args.data)
        columns = COLUMNS
    elif args.part == "gain":
        figures, rows = measure_gain(args.model, args.data, args.rounds, args.dialogues)
        columns = GAIN_COLUMNS
    else:
        load = Load(args.sequences, args.rounds, args.prompt, args.tokens, args.methods, args.fixed)
        figures, rows = measure_load(args.model, args.data, load)
        columns = [
            "sequences",
            "drafts",
            "over off, median",
            "lower 95 % bound of the mean",
            "over the best fixed depth",
        ]
    report(f"speculation_{args.part}_{shape}", args.results, {"model": shape, **figures}, columns, rows)


if __name__ == "__main__":
    main()
