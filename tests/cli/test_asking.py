"""`chat`, `complete`, `embed` and `tokenize`: of a model here, and of a running server's, alike."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from penstock.cli.main import app
from tests.cli.screen import ENTER, Terminal
from tests.server.served import Served, listening

FOOD, KIND = "I am looking for a place to eat.", "What kind of food do you like?"
BUNDLED = "penstock-concierge"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    flags = ["--port", "0", "--threads", "1", "--max-model-len", "512", "--api-key", "open sesame".replace(" ", "-")]
    found = listening("-m", "penstock", "serve", *flags)
    try:
        found.wait_ready()
        yield found
    finally:
        found.process.kill()
        found.process.wait()


def call(*arguments: str, input: str = "", **variables: str) -> Result:
    return CliRunner().invoke(app, list(arguments), input=input, env={"PENSTOCK_API_KEY": "open-sesame", **variables})


def told(*arguments: str, input: str = "") -> Any:
    result = call(*arguments, "--json", input=input)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_question_is_answered_here_and_elsewhere_alike(served: Served) -> None:
    own, other = (told("chat", *there, "-q", FOOD, "--temperature", "0") for there in ((), ("--url", served.url)))
    for found in (own, other):
        assert found["model"] == BUNDLED
        assert found["message"] == {"role": "assistant", "content": KIND}
        assert found["finish_reason"] == "stop"
        assert found["timings"]["total_ms"] >= found["timings"]["ttft_ms"] > 0
    counted = [
        {name: found["usage"][name] for name in ("prompt_tokens", "completion_tokens")} for found in (own, other)
    ]
    assert counted[0] == counted[1] and counted[0]["prompt_tokens"] > 10
    piped = call("chat", "--url", f"{served.url}/v1", "--model-name", BUNDLED, "--temperature", "0", input=FOOD)
    assert (piped.exit_code, piped.stdout) == (0, KIND + "\n")
    cut = told("chat", "--url", served.url, "-q", FOOD, "--max-tokens", "2", "--system-prompt", "Be kind.")
    assert (cut["finish_reason"], cut["usage"]["completion_tokens"]) == ("length", 2)


def test_a_call_is_told_as_a_call(served: Served, tmp_path: Path) -> None:
    weather = {
        "name": "GetWeather", "description": "Get the weather of a certain location on a date",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }  # fmt: skip
    (tmp_path / "tools.json").write_text(json.dumps([{"type": "function", "function": weather}]), encoding="utf-8")
    asked = ("-q", "What is the weather in San Francisco?", "--temperature", "0", "--tools", f"{tmp_path}/tools.json")
    for there in ((), ("--url", served.url)):
        found = told("chat", *there, *asked)
        assert found["finish_reason"] == "tool_calls"
        (made,) = found["message"]["tool_calls"]
        assert made["function"]["name"] == "GetWeather"
        assert json.loads(made["function"]["arguments"]) == {"city": "San Francisco"}


def test_a_text_goes_on_here_and_elsewhere_alike(served: Served) -> None:
    asked = ("-q", "I am looking for", "--temperature", "0", "--max-tokens", "12", "--logprobs", "2")
    own, other = told("complete", *asked), told("complete", "--url", served.url, *asked)
    for name in ("text", "token_ids", "finish_reason"):
        assert own[name] == other[name], name
    assert own["usage"]["prompt_tokens"] == other["usage"]["prompt_tokens"]
    assert [round(entry["logprob"], 3) for entry in own["logprobs"]] == [
        round(entry["logprob"], 3) for entry in other["logprobs"]
    ]
    assert all(len(entry["top"]) >= 2 for entry in other["logprobs"])
    assert told("generate", *asked)["text"] == own["text"]
    streamed = call("complete", "--url", served.url, *asked[:-2])
    assert streamed.stdout == own["text"] + "\n"


def test_texts_become_vectors_here_and_elsewhere_alike(served: Served) -> None:
    texts = ("A hotel in Paris.", "A table for two.")
    own = told("embed", BUNDLED, *texts)
    other = told("embed", "--url", served.url, input="\n".join(texts) + "\n\n")
    assert [entry["index"] for entry in other["data"]] == [0, 1]
    for mine, theirs in zip(own["data"], other["data"], strict=True):
        assert mine["embedding"] == pytest.approx(theirs["embedding"], abs=1e-5)
        assert sum(value * value for value in mine["embedding"]) == pytest.approx(1, abs=1e-4)
    assert own["usage"] == other["usage"]
    lines = call("embed", "--dimensions", "8", "--whole", input="\n".join(texts)).stdout.splitlines()
    assert [len(json.loads(line)) for line in lines] == [8]
    many = told("embed", "--url", served.url, "--dimensions", "2", input="hello\n" * 300)  # more than one request
    assert [entry["index"] for entry in many["data"]] == [*range(300)]
    assert many["usage"]["prompt_tokens"] == 300 * (many["usage"]["prompt_tokens"] // 300)


def test_tokens_and_back_here_and_elsewhere_alike(served: Served) -> None:
    text = "A table for zwölf, 请.\n"
    own, other = (told("tokenize", *there, input=text) for there in ((), ("--url", served.url)))
    assert own == other
    assert own["count"] == len(own["tokens"]) == len(own["pieces"]) > 5
    ids = call("tokenize", "--ids", input=text).stdout
    assert json.loads(ids) == own["tokens"]
    for there in ((), ("--url", served.url)):
        assert told("tokenize", *there, "--decode", input=ids) == {"text": text}
        assert call("tokenize", *there, "--decode", input=" ".join(map(str, own["tokens"]))).stdout == text + "\n"
    lines = call("tokenize", BUNDLED, "A table").stdout.splitlines()
    assert [line.split()[1] for line in lines] == ['"A"', '"Ġtable"']


def test_a_terminal_without_a_text_is_asked_for_lines(tmp_path: Path) -> None:
    terminal = Terminal("complete", "--temperature", "0", "--max-tokens", "4", home=tmp_path)
    try:
        terminal.expect("Ctrl-D leaves")
        terminal.ask("I am looking")
        terminal.expect("for a place to")
        terminal.ask("I would like to book a")
        terminal.expect("> I would like to book a\n")
        terminal.prompted()
        terminal.press("\x04")
        assert terminal.process.wait(60) == 0
    finally:
        terminal.close()
    chat = Terminal("chat", "--temperature", "0", home=tmp_path)
    try:
        chat.expect("/help lists commands")
        chat.ask(FOOD)
        chat.expect(KIND)
        chat.ask("/quit" + ENTER)
        assert chat.process.wait(60) == 0
    finally:
        chat.close()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["chat", "--json", "-q", " "], "there is no question"),
        (["complete", "--url", "http://127.0.0.1:9", "-q", "x"], "no server answers at"),
        (["embed", "--url", "ftp://x", "m", "x"], "--url is 'ftp://x'"),
        (["embed"], "there is nothing to embed"),
        (["embed", "llama3.2", "x"], "there is no model 'llama3.2'"),
        (["tokenize", BUNDLED, "--decode", "one"], '"one" is no token id'),
        (["tokenize", BUNDLED, "--decode", "999999"], "999999 is no token of this model; ids are below"),
        (["tokenize", BUNDLED, "--decode"], '"" is no token id'),
    ],
)
def test_what_cannot_be_asked_says_why(arguments: list[str], said: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 1
    assert said in result.stderr, result.output


def test_refusals_of_a_server_are_told(served: Served) -> None:
    unknown = call("tokenize", "--url", served.url, "third", "x")
    assert (unknown.exit_code, "it has: penstock-concierge" in unknown.stderr) == (1, True)
    locked = call("chat", "--url", served.url, "-q", "x", PENSTOCK_API_KEY="")
    assert (locked.exit_code, "answers 401" in locked.stderr) == (1, True)
    beyond = call("tokenize", "--url", served.url, BUNDLED, "--decode", "999999")
    assert (beyond.exit_code, "answers 400" in beyond.stderr) == (1, True)


@pytest.mark.parametrize("command", ["run", "chat", "complete", "embed"])
def test_flags_of_a_model_here_are_refused_beside_a_url(command: str) -> None:
    result = call(command, "--url", "http://127.0.0.1:9", "--dtype", "bf16", "--threads", "2")
    assert result.exit_code == 2
    assert "--dtype, --threads: the server at --url has settings of its own" in " ".join(result.stderr.split())
    by_variable = call(command, "--url", "http://127.0.0.1:9", "m", PENSTOCK_DTYPE="bf16", input="x")
    assert "no server answers" in by_variable.stderr  # a variable is for all commands
