"""Heads that were made for the bundled model's twin propose what their authors' code does, and change no answer."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.config.constraint import Grammar, GrammarKind
from penstock.config.errors import ConfigError
from penstock.config.options import EngineOptions
from penstock.config.sampling import SamplingParams
from penstock.core.protocol import StepPlan
from penstock.core.request import EngineRequest
from penstock.engine.build import build_engine
from penstock.engine.loop import Engine
from penstock.engine.text_pipeline import TextPipeline
from penstock.kernels.cpu import native
from penstock.runtime.drafters import head as head_module
from penstock.runtime.drafters.depths import FixedDepths
from penstock.runtime.drafters.drafter import Draft
from penstock.runtime.runner import ModelRunner
from tests.engine.test_drafts import Answer, Key, check, run
from tests.engine.test_grammars import held
from tests.models import tiny

MODEL = "penstock-concierge"
DEPTHS = {"eagle3": 7, "mtp": 7, "medusa": 4, "p-eagle": 7}
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "n": 2, "repetition_penalty": 1.2, "presence_penalty": 0.3},
    {"temperature": 1.0, "top_k": 40, "min_tokens": 9, "logprobs": 0, "logit_bias": ((5, 2.0),)},
)


@pytest.fixture(scope="module")
def models(shared_data: Path) -> Path:
    return shared_data / "models"


def asked(models: Path, kind: str, depth: int) -> dict[str, Any]:
    """What `--speculative-config` says, and the target."""
    return {"method": kind, "model": str(models / f"{MODEL}-{kind}"), "num_speculative_tokens": depth}


def made(models: Path, config: Mapping[str, Any] | None, **more: Any) -> Engine:
    options: dict[str, Any] = {
        "dtype": "float32", "kv_cache_dtype": "float32", "threads": 1, "max_num_seqs": 4, "max_model_len": 1024,
        "block_size": 8, "kv_blocks": 300, **more,
    }  # fmt: skip
    said = None if config is None else json.dumps({"adaptive": False, **config})
    return build_engine(EngineOptions(str(models / MODEL), speculative_config=said, **options))[0]


@dataclass
class Watched:
    """A drafter whose proposals are kept, by request and number of tokens before them; and perhaps not made."""

    drafter: Any
    told: bool = True
    made: dict[tuple[str, int], tuple[int, ...]] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def propose(self, wanted: Mapping[int, int]) -> Sequence[Draft]:
        rows = self.drafter._rows
        known = {slot: (rows[slot].new.request_id, len(rows[slot].tokens)) for slot in wanted if slot in rows}
        found = self.drafter.propose(wanted)
        self.made |= {known[draft.slot]: draft.tokens for draft in found}
        return found if self.told else []


def watched(engine: Engine, *, told: bool = True) -> Watched:
    assert isinstance(engine.runner, ModelRunner)
    drafting = engine.runner._drafting
    found = Watched(drafting._drafter, told)
    drafting.use_tapped(found)  # type: ignore[arg-type]  # the rest is the drafter's
    return found


def golden(models: Path, kind: str) -> list[dict[str, Any]]:
    text = (models / f"{MODEL}-{kind}" / "drafts.json").read_text(encoding="utf-8")
    items: list[dict[str, Any]] = json.loads(text)["items"]
    return items


def rounds(item: Mapping[str, Any]) -> set[int]:
    """Tokens of an answer, less one, that are known where each step begins: behind the accepted drafts of the last."""
    greedy, at, found = item["greedy"], 0, set[int]()
    while at < min(len(greedy) - 1, len(item["proposals"])):
        found.add(at)
        drafts, right = item["proposals"][at], 0
        while right < len(drafts) and at + right + 1 < len(greedy) and drafts[right] == greedy[at + right + 1]:
            right += 1
        at += right + 1
    return found


@pytest.mark.skipif(not native.available(), reason="the native library is not built")
@pytest.mark.parametrize("kind", DEPTHS)
@pytest.mark.parametrize("told", [False, True], ids=["unverified", "verified"])
def test_proposals_are_those_of_the_heads_authors(models: Path, kind: str, told: bool) -> None:
    """At every start where none is verified, and at just those of their rounds where they are.

    Their arithmetic is float32, which instruction sets that multiply rounded pairs do not have.
    """
    isa = "avx2" if "avx2" in native.usable_isas() else "generic"
    engine = made(models, asked(models, kind, DEPTHS[kind]), max_chunk_tokens=50, isa=isa)
    watch = watched(engine, told=told)
    items = golden(models, kind)[:12]
    requests = []
    for number, item in enumerate(items):
        params = SamplingParams(temperature=0.0, max_tokens=len(item["greedy"]))
        requests.append(EngineRequest(f"{number}", tuple(item["prompt"]), params, speculate=DEPTHS[kind]))
    answers = run(engine, *requests)
    compared = 0
    for number, item in enumerate(items):
        assert answers[f"{number}", 0].tokens == item["greedy"]
        for start, proposal in enumerate(item["proposals"]):
            drafts = watch.made.get((f"{number}", len(item["prompt"]) + 1 + start))
            if drafts is not None:
                assert list(drafts) == proposal[: len(drafts)], (number, start)
                compared += len(drafts)
        starts = {known - len(item["prompt"]) - 1 for name, known in watch.made if name == f"{number}"}
        if told:
            assert {start for start in starts if start < len(item["proposals"])} == rounds(item), number
    stats = engine.stats()
    engine.close()
    assert stats.drafter_failures == 0
    assert compared > (600 if not told else 200)
    assert (stats.accepted_tokens > 100) == told


def lives(models: Path, kind: str) -> list[EngineRequest]:
    """Requests of every kind, of which some share prompts."""
    requests = []
    for number, item in enumerate(golden(models, kind)[:8]):
        prompt = tuple(item["prompt"][: 60 + 20 * (number % 3)] if number % 2 else item["prompt"][:300])
        params = SamplingParams(**{"max_tokens": 20, **KINDS[number % 4]})
        requests.append(EngineRequest(f"r{number}", prompt, params, (2,), seed=number))
    return requests


@pytest.mark.skipif(not native.available(), reason="the native library is not built")
@pytest.mark.parametrize("kind", DEPTHS)
def test_answers_are_those_without_it(models: Path, kind: str) -> None:
    """Prefixes that it has seen or not, preemption, chunks, little memory, company, cancelled requests."""
    plain = made(models, None)
    requests = lives(models, kind)
    truth: dict[Key, Answer] = run(plain, *requests)
    plain.close()
    preemptions = 0
    for number, more in enumerate(({}, {"max_chunk_tokens": 24, "kv_blocks": 80}, {"block_size": 16})):
        dice = random.Random(f"{kind}{number}")
        engine = made(models, asked(models, kind, min(4, DEPTHS[kind])), **more)
        run(engine, *(replace(one, request_id=f"{one.request_id}#u") for one in requests[::2]))
        for turn in range(2):
            again = [replace(one, request_id=f"{one.request_id}#{turn}", speculate=4) for one in requests]
            check(run(engine, *again, dice=dice if turn or number else None), truth)
        stats = engine.stats()
        engine.close()
        assert stats.drafter_failures == 0
        assert stats.accepted_tokens > 30 and stats.drafted_tokens > stats.accepted_tokens
        assert stats.prefix_hits > 0
        preemptions += stats.preemptions
    assert preemptions > 0


class Pausing(FixedDepths):
    """Now and then nobody looks at hidden states for some steps, nor wants drafts."""

    def __init__(self) -> None:
        super().__init__()
        self._dice, self._left = random.Random(7), 12

    def step(self, plan: StepPlan, seconds: float) -> None:
        self._left = self._left - 1 if self._left > -6 else self._dice.randrange(5, 20)

    @property
    def paused(self) -> bool:
        return self._left <= 0

    def wanted(self, most: Mapping[int, int]) -> Mapping[int, int]:
        return {} if self.paused else most


@pytest.mark.skipif(not native.available(), reason="the native library is not built")
@pytest.mark.parametrize("kind", DEPTHS)
def test_pauses_cost_drafts_and_change_nothing(models: Path, kind: str) -> None:
    plain = made(models, None)
    requests = lives(models, kind)
    truth: dict[Key, Answer] = run(plain, *requests)
    plain.close()
    engine = made(models, asked(models, kind, 4), max_chunk_tokens=24)
    assert isinstance(engine.runner, ModelRunner)
    engine.runner._drafting._depths = Pausing()
    for turn in range(2):
        again = [replace(one, request_id=f"{one.request_id}#{turn}", speculate=4) for one in requests]
        check(run(engine, *again), truth)
    stats = engine.stats()
    engine.close()
    assert stats.drafter_failures == 0
    assert stats.drafted_tokens > stats.accepted_tokens > 5


@pytest.mark.skipif(not native.available(), reason="the native library is not built")
@pytest.mark.parametrize("kind", DEPTHS)
def test_answers_under_grammars_are_those_without_it(models: Path, kind: str) -> None:
    text = TextPipeline.load(str(models / MODEL))
    words = Grammar(GrammarKind.LARK, "start: /[a-zA-Z ,.?!0-9$-]{20,200}/")
    requests = [
        held(text, "form", temperature=0.0),
        replace(held(text, "words", temperature=0.0, logprobs=1), grammar=words),
        replace(held(text, "sampled", temperature=0.7, n=2), grammar=words),
    ]
    plain = made(models, None)
    truth = run(plain, *requests)
    plain.close()
    engine = made(models, asked(models, kind, 4))
    check(run(engine, *(replace(one, speculate=4) for one in requests)), truth)
    stats = engine.stats()
    engine.close()
    assert stats.drafter_failures == 0 and stats.drafted_tokens > stats.accepted_tokens > 0


KEEPING = [kind for kind in DEPTHS if kind != "medusa"]  # those that keep something of every token


@pytest.mark.skipif(not native.available(), reason="the native library is not built")
@pytest.mark.parametrize("kind", KEEPING)
def test_what_lacks_entries_is_left_out(models: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix that was computed for others, or while nobody wanted drafts: there are drafts again behind it."""
    item = max((one for one in golden(models, kind) if len(one["prompt"]) < 450), key=lambda one: len(one["greedy"]))
    params = SamplingParams(temperature=0.0, max_tokens=len(item["greedy"]))
    request = EngineRequest("r", tuple(item["prompt"]), params, speculate=5)
    engine = made(models, asked(models, kind, 5))
    watch = watched(engine)
    run(engine, replace(request, request_id="others", speculate=0))
    assert not watch.made
    assert run(engine, request)["r", 0].tokens == item["greedy"]
    hit = len(item["prompt"]) - 1
    starts = [known for _, known in watch.made]
    assert hit + 2 < min(starts) <= (hit // 8 + 1) * 8 + 8  # from the first whole block on
    seen = engine.stats().accepted_tokens
    assert seen > 0
    monkeypatch.setattr(head_module, "_UNASKED", -1)  # nobody asks between prompts and draws
    long = replace(request, prompt_ids=(*item["prompt"][1:], *item["prompt"]), request_id="long")
    answers = run(engine, long)
    stats = engine.stats()
    engine.close()
    plain = made(models, None)
    assert run(plain, replace(long, speculate=0)) == answers
    plain.close()
    assert stats.drafter_failures == 0


@pytest.mark.skipif(not native.available(), reason="the native library is not built")
@pytest.mark.parametrize("kind", KEEPING)
def test_a_conversation_keeps_its_entries(models: Path, kind: str) -> None:
    """Those of the last tokens of an answer are made when it has ended, so that the next turn has all of them."""
    item = golden(models, kind)[0]
    params = SamplingParams(temperature=0.0, max_tokens=12)
    first = EngineRequest("first", tuple(item["prompt"]), params, speculate=5)
    engine = made(models, asked(models, kind, 5))
    watch = watched(engine)
    answer = run(engine, first)["first", 0].tokens
    follow = (*item["prompt"], *answer, *item["prompt"][4:30])
    run(engine, replace(first, prompt_ids=follow, request_id="second"))
    engine.close()
    anew = made(models, asked(models, kind, 5), enable_prefix_caching=False)
    other = watched(anew)
    run(anew, replace(first, prompt_ids=follow, request_id="second"))
    anew.close()
    seconds = {known: drafts for (name, known), drafts in watch.made.items() if name == "second"}
    assert seconds and seconds == {known: drafts for (_, known), drafts in other.made.items()}


def test_layers_of_the_targets_own_files(models: Path) -> None:
    """They are found without being named, and a target's memory is planned without them."""
    target = str(models / f"{MODEL}-mtp")
    options = EngineOptions(target, dtype="float32", max_model_len=600, kv_blocks=50)
    plans = []
    for one in (options, replace(options, speculative_config='{"method": "mtp"}')):
        engine, info = build_engine(one)
        item = golden(models, "mtp")[0]
        params = SamplingParams(temperature=0.0, max_tokens=len(item["greedy"]))
        answer = run(engine, EngineRequest("r", tuple(item["prompt"]), params, speculate=4))
        assert answer["r", 0].tokens == item["greedy"]
        plans.append((engine.stats().accepted_tokens, {row.name: row.value for row in info.memory}))
        engine.close()
    assert plans[0][0] == 0 < plans[1][0]
    assert plans[0][1]["weights"] == plans[1][1]["weights"]
    assert "draft model" not in plans[0][1] and "draft model" in plans[1][1]


def test_the_method_is_read_from_the_head(models: Path) -> None:
    config = asked(models, "eagle3", 3)
    del config["method"]
    engine, info = build_engine(EngineOptions(str(models / MODEL), speculative_config=json.dumps(config)))
    runner = engine.runner
    assert isinstance(runner, ModelRunner) and runner._drafting.taps.names
    engine.close()
    assert {row.name for row in info.memory} >= {"draft model"}


def changed(source: Path, target: Path, config: Mapping[str, Any], change: Callable[[dict[str, Any]], None]) -> Path:
    """A head's folder with other fields and tensors."""
    shutil.copytree(source, target, copy_function=shutil.copyfile)
    target.chmod(0o755)
    fields = {**json.loads((target / "config.json").read_text(encoding="utf-8")), **config}
    (target / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


def _nothing(tensors: dict[str, Any]) -> None:
    pass


def _nan(tensors: dict[str, Any]) -> None:
    tensors["midlayer.mlp.down_proj.weight"][3, 4] = float("nan")


def _missing(tensors: dict[str, Any]) -> None:
    del tensors["midlayer.self_attn.k_proj.weight"]


def _misshapen(tensors: dict[str, Any]) -> None:
    tensors["fc.weight"] = tensors["fc.weight"][:, :512].contiguous()


def _far(tensors: dict[str, Any]) -> None:
    tensors["d2t"][-1] = 1 << 40


def _twice(tensors: dict[str, Any]) -> None:
    tensors["d2t"][:] = -torch.arange(2048)


def _shorter(tensors: dict[str, Any]) -> None:
    tensors["d2t"] = tensors["d2t"][:1000].clone()


@pytest.mark.parametrize(
    ("config", "change", "told"),
    [
        ({}, _nan, "tensor 'midlayer.mlp.down_proj.weight' of the head .* no finite numbers"),
        ({}, _missing, "1 missing: model.layers.0.self_attn.k_proj.weight"),
        ({}, _misshapen, r"fc.weight \(is \[256, 512\], must be \[256, 768\]"),
        ({}, _far, "names the target's token .* the target has 4096"),
        ({}, _twice, "names a token of the target twice"),
        ({"vocab_size": 32000}, _nothing, "a vocabulary of 32000 tokens, the target has one of 4096"),
        ({"target_hidden_size": 4096}, _nothing, "of 4096 elements .target_hidden_size., the target's have 256"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 18, 33]}, _nothing, "layers 2, 18, 33 .* no layer 18"),
        ({"hidden_size": 0}, _nothing, "hidden_size is 0"),
        ({"eagle_aux_hidden_state_layer_ids": ["x"]}, _nothing, "a list of integers"),
        ({}, _shorter, "'d2t' names 1000 tokens, and it guesses 2048"),
        ({"architectures": ["MedusaModel"]}, _nothing, "is a head for method medusa, and method eagle3"),
        ({"architectures": ["Other"]}, _nothing, "is no such head: architectures is"),
    ],
)
def test_what_does_not_fit_is_told(
    models: Path, tmp_path: Path, config: Mapping[str, Any], change: Callable[[dict[str, Any]], None], told: str
) -> None:
    folder = changed(models / f"{MODEL}-eagle3", tmp_path / "head", config, change)
    with pytest.raises(ConfigError, match=told) as refusal:
        made(models, {"method": "eagle3", "model": str(folder)})
    assert "--speculative-config: '" in str(refusal.value) and "hidden states of 256 elements" in str(refusal.value)


def test_a_head_of_another_model_is_refused(models: Path, tmp_path: Path) -> None:
    tiny.save("llama", tmp_path)
    config = json.dumps(asked(models, "eagle3", 3))
    with pytest.raises(ConfigError, match="vocabulary of 4096 tokens, the target has one of 101"):
        build_engine(EngineOptions(str(tmp_path), dtype="float32", max_model_len=64, speculative_config=config))
