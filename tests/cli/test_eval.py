"""`penstock eval`: the harness's own scoring over this engine, which equals what the engine says of itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from lm_eval.api.instance import Instance
from typer.testing import CliRunner

from penstock import LLM, SamplingParams
from penstock.cli.eval import _model
from penstock.cli.harness import HarnessModel
from penstock.cli.main import app
from penstock.config.options import EngineOptions

MULTIPLE = """
task: dinner
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{question}}"
doc_to_target: "{{gold}}"
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
WRITTEN = """
task: continued
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
output_type: generate_until
test_split: test
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: [" stay"], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
QUESTIONS: list[dict[str, Any]] = [
    {"question": "I am looking for a", "choices": [" place to eat", " zebra"], "gold": 0, "answer": " place to"},
    {"question": "What kind of", "choices": [" purple of the", " food do you like?"], "gold": 1, "answer": "nothing"},
]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with two tasks and their data; the harness's own caches lie beside it."""
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "dinner.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    for name, text in (("dinner", MULTIPLE), ("continued", WRITTEN)):
        (folder / f"{name}.yaml").write_text(text.replace("DATA", str(data)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", str(folder / "cache"))
        yield folder


@pytest.fixture(scope="module")
def model() -> Iterator[HarnessModel]:
    """The bundled model, as the harness asks it."""
    with asyncio.Runner() as runner, ExitStack() as stack:
        yield _model(EngineOptions(), runner, stack, 4, None)


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM() as llm:
        yield llm


def instance(*arguments: Any) -> Instance:
    return Instance(request_type="loglikelihood", doc={}, arguments=arguments, idx=0)


def scores(plain: LLM, ids: list[int]) -> list[float]:
    (found,) = plain.generate([ids], SamplingParams(max_tokens=1, prompt_logprobs=0))
    return [entry.logprob for entry in found.prompt_logprobs]


def test_continuations_are_scored_as_the_engine_scores_them(model: HarnessModel, plain: LLM) -> None:
    pairs = [("I am looking for a", " place to stay"), ("I am looking for a", " zebra"), ("", "Hello there")]
    found = model.loglikelihood([instance(*pair) for pair in pairs], disable_tqdm=True)
    for (context, continuation), (total, greedy) in zip(pairs, found, strict=True):
        before = model.tok_encode(context) if context else [model.prefix_token_id]
        whole = model.tok_encode(context + continuation) if context else before + model.tok_encode(continuation, False)
        assert total == pytest.approx(sum(scores(plain, whole)[len(before) - 1 :]), abs=1e-4)
        (drawn,) = plain.generate([before], SamplingParams(max_tokens=len(whole) - len(before), temperature=0))
        assert greedy == (list(drawn.outputs[0].token_ids) == whole[len(before) :])
    assert [greedy for _, greedy in found] == [True, False, False]


def test_a_text_longer_than_the_context_is_scored_once_all_over(
    model: HarnessModel, plain: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "A table for two, please. " * 8
    ids = model.tok_encode(text, False)
    (whole,) = model.loglikelihood_rolling([instance(text)])
    assert whole == pytest.approx(sum(scores(plain, [model.prefix_token_id, *ids])), abs=1e-3)
    longest, model.max_length = model.max_length, 20
    scored: list[int] = []
    plainly = model._scored

    async def counted(whole: Sequence[int], first: int) -> tuple[float, bool]:
        scored.extend(whole[first:])
        return await plainly(whole, first)

    monkeypatch.setattr(model, "_scored", counted)
    try:
        (parts,) = model.loglikelihood_rolling([instance(text)])
    finally:
        model.max_length = longest
    assert scored == ids and len(ids) > 40 and parts < 0


def test_contexts_that_are_too_long_lose_their_begin(model: HarnessModel) -> None:
    longest, model.max_length = model.max_length, 12
    try:
        ((total, _),) = model.loglikelihood([instance("nothing " * 50, " place to eat")], disable_tqdm=True)
    finally:
        model.max_length = longest
    assert total < 0


def test_a_chat_is_asked_in_the_models_own_template(model: HarnessModel) -> None:
    text = model.apply_chat_template([{"role": "user", "content": "Hello!"}])
    assert "Hello!" in text and text != "Hello!"
    assert "{" not in model.chat_template(True)


def test_tasks_are_told_as_a_table_and_as_json(tasks: Path, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    arguments = ("--tasks", "dinner,continued", "--include-path", str(tasks), "--json", str(path), "--log-samples")
    result = CliRunner().invoke(app, ["eval", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found = json.loads(path.read_text())
    assert found["results"]["dinner"]["acc,none"] == 1.0
    assert found["results"]["continued"]["exact_match,none"] == 0.5
    assert found["samples"]["continued"][0]["resps"] == [[" place to"]]
    assert "dinner" in result.stdout and "1.0000" in result.stdout and "0.5000" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--tasks", "diner"), "has no task 'diner'. Did you mean 'dinner'?"),
        (("--tasks", ","), "--tasks is empty"),
        (("--tasks", "dinner", "--limit", "0"), "allowed: a number above 0"),
        (("--tasks", "dinner", "--log-samples"), "--json, which is not given"),
        (("--tasks", "dinner", "--json", "/nowhere/x.json"), "there is no folder /nowhere"),
    ],
)
def test_what_cannot_be_asked_is_said_before_a_model_loads(tasks: Path, arguments: tuple[str, ...], told: str) -> None:
    result = CliRunner().invoke(app, ["eval", "--include-path", str(tasks), *arguments], catch_exceptions=False)
    assert result.exit_code == 1 and told in result.output
