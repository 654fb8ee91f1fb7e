"""`penstock run` as a person sees it, in a terminal and in pipes."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli.main import app
from tests.cli.conftest import Penstock
from tests.cli.screen import ALT_ENTER, ENTER, TAB, UP, Terminal

WEATHER = {
    "type": "function",
    "function": {
        "name": "GetWeather",
        "description": "Get the weather of a certain location on a date",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
FOOD, KIND = "I am looking for a place to eat.", "What kind of food do you like?"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "tools.json").write_text(json.dumps([WEATHER]), encoding="utf-8")
    return tmp_path


def test_a_chat_keeps_its_history_and_survives_ctrl_c(home: Path) -> None:
    saved = home / "chat.json"
    terminal = Terminal("run", "--temperature", "0", home=home)
    try:
        terminal.expect("/help lists commands")
        terminal.ask("/help")
        terminal.expect("/save FILE, /load FILE")
        terminal.ask(FOOD)
        terminal.expect(KIND)
        terminal.ask("Chinese food.")
        terminal.expect("What city do you want to eat in?")
        terminal.interrupt("Ctrl-D leaves")
        terminal.ask(f"/save {saved}")
        terminal.expect("Saved to")
        terminal.ask("/clear")
        terminal.expect("forgotten")
        terminal.ask(f"/load {saved}")
        terminal.expect("Loaded 4 messages")
        terminal.prompted()
        terminal.press("\x04")
        assert terminal.process.wait(60) == 0
    finally:
        terminal.close()
    messages = json.loads(saved.read_text(encoding="utf-8"))
    assert [message["role"] for message in messages] == ["user", "assistant", "user", "assistant"]
    assert messages[1]["content"] == KIND
    again = Terminal("run", "--temperature", "0", home=home)
    try:
        again.expect("/help lists commands")
        again.prompted()
        again.press(UP * 5)  # /load, /clear, /save, then what was asked
        again.expect("> " + FOOD)
    finally:
        again.close()


def test_what_is_pasted_is_one_question_and_lines_can_be_many(home: Path) -> None:
    terminal = Terminal("run", "--temperature", "0", home=home)
    try:
        terminal.expect("/help lists commands")
        terminal.prompted()
        terminal.paste("I'm looking\nfor a place\nto eat.")
        terminal.expect("to eat.")
        terminal.press(ENTER)
        terminal.expect("?")
        terminal.ask("one" + ALT_ENTER + "two\\" + ENTER + "three")
        terminal.expect("  three")
        terminal.ask("/show messages")
        terminal.expect("user: ", times=2)
        terminal.expect("one\ntwo\nthree")
        assert "user: I'm looking\nfor a place\nto eat." in terminal.shown()
    finally:
        terminal.close()


def test_ctrl_c_stops_an_answer_not_the_chat(home: Path) -> None:
    saved = home / "chat.json"
    terminal = Terminal("run", "--temperature", "1", "--min-p", "0", "--top-p", "1", "--ignore-eos", home=home)
    try:
        terminal.expect("/help lists commands")
        terminal.ask("Book a long story.")
        terminal.expect("story.\n")
        terminal.interrupt("[stopped]")
        terminal.ask(f"/save {saved}")
        terminal.expect("Saved to")
        terminal.ask("/quit")
        assert terminal.process.wait(60) == 0
    finally:
        terminal.close()
    assert [message["role"] for message in json.loads(saved.read_text(encoding="utf-8"))] == ["user", "assistant"]


def test_calls_and_settings_and_another_answer(home: Path) -> None:
    terminal = Terminal(
        "run", "--temperature", "0", "--verbose", "--tools", str(home / "tools.json"), home=home, columns=120
    )
    try:
        terminal.expect("/help lists commands")
        terminal.ask("What is the weather in San Francisco?")
        terminal.expect('→ GetWeather(city="San Francisco")')
        terminal.expect("tokens/s")
        terminal.prompted()
        terminal.press("/re" + TAB)
        terminal.expect("> /regen")
        terminal.press(ENTER)
        terminal.expect('→ GetWeather(city="San Francisco")', times=2)
        terminal.ask('/tool {"temperature": "78"}')
        terminal.expect("tokens/s", times=3)
        terminal.ask("/show messages")
        terminal.expect('assistant: → GetWeather(city="San Francisco")')
        terminal.ask("/set")
        terminal.expect("temperature 0.0\n")
        terminal.ask("/set temprature 2")
        terminal.expect("Did you mean 'temperature'?")
        terminal.ask("/set temperature -3")
        terminal.expect("temperature is -3.0; allowed:")
        terminal.ask("/set temperature 0.5")
        terminal.expect("temperature is 0.5.")
        terminal.ask("/set")
        terminal.expect("temperature 0.5\n")
        terminal.ask("/show")
        terminal.expect("Qwen3ForCausalLM")
        terminal.ask("/model ./nowhere")
        terminal.expect("there is no model at './nowhere'")
        terminal.ask("/dance")
        terminal.expect("/dance is no command")
    finally:
        terminal.close()


def test_a_narrow_window_and_another_size(home: Path) -> None:
    terminal = Terminal("run", "--temperature", "0", home=home, columns=30, rows=16)
    try:
        terminal.expect("/help")
        terminal.prompted()
        terminal.press(FOOD)
        terminal.expect("at.")
        terminal.resize(90, 16)
        terminal.press(ENTER)
        terminal.expect(KIND)
    finally:
        terminal.close()


class Reasoner(BaseHTTPRequestHandler):
    """A server that reasons before it answers, and writes what no terminal should be sent."""

    def do_GET(self) -> None:
        self._send("application/json", json.dumps({"data": [{"id": "thinker"}, {"id": "other"}]}))

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if asked["messages"][-1]["content"] == "fail":
            self._send("application/json", json.dumps({"error": {"message": "that is not possible."}}), 400)
            return
        deltas: list[dict[str, Any]] = [
            {"reasoning_content": "Let me "}, {"reasoning_content": "think."}, {"content": "\n\nForty"},
            {"content": "-two\x1b]0;title\x07."},
        ]  # fmt: skip
        events = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
        events.append({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 9}})
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        self._send("text/event-stream", "".join(lines) + "data: [DONE]\n\n")

    def _send(self, kind: str, text: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *arguments: object) -> None:
        """Says nothing."""


@pytest.fixture(scope="module")
def thinker() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Reasoner)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_reasoning_is_dimmed_or_hidden_and_a_running_server_answers(thinker: str, home: Path) -> None:
    terminal = Terminal("run", "--url", thinker, "--verbose", home=home)
    try:
        terminal.expect("thinker: ask away")
        terminal.ask("What?")
        terminal.expect_raw(b"\x1b[2mLet me think.\x1b[0m")
        terminal.expect("Forty-two")
        terminal.expect("prompt 7 tokens")
        assert b"\x1b]0;title" not in terminal.raw
        terminal.ask("/set think off")
        terminal.expect("Reasoning is hidden")
        terminal.ask("What?")
        terminal.expect("Forty-two", times=2)
        assert terminal.shown().count("Let me think.") == 1
        terminal.ask("fail")
        terminal.expect("answers 400: that is not possible.")
        terminal.ask("/model other")
        terminal.expect("other answers now")
        terminal.ask("/model third")
        terminal.expect("it has: thinker, other.")
    finally:
        terminal.close()


def test_pipes_get_the_answer_alone(thinker: str, penstock: Penstock, home: Path) -> None:
    said = penstock("run", "--url", thinker, input="What?\n")
    assert (said.returncode, said.stdout.strip()) == (0, "Forty-two\x1b]0;title\x07.")
    assert "Let me think" not in said.stdout + said.stderr
    called = penstock(
        "run", "penstock-concierge", "What is the weather in San Francisco?", "--temperature", "0",
        "--tools", str(home / "tools.json"),
    )  # fmt: skip
    assert called.stdout == 'GetWeather(city="San Francisco")\n'


def test_what_cannot_be_asked_says_why(thinker: str, home: Path) -> None:
    for arguments, said in (
        (["--url", "http://127.0.0.1:9", "m", "x"], "no server answers at"),
        (["--url", "ftp://x", "m", "x"], "--url is 'ftp://x'"),
        (["llama3.2"], "there is no model 'llama3.2'"),
        (["--url", thinker, "third", "x"], "has no model"),
        (["--tools", str(home / "none.json"), "penstock-concierge", "x"], "cannot be read"),
    ):
        result = CliRunner().invoke(app, ["run", *arguments])
        assert result.exit_code == 1
        assert said in result.stderr, result.output


def test_one_log_format_and_no_line_written_over_another(home: Path) -> None:
    terminal = Terminal("serve", "--port", "0", home=home, columns=160)
    try:
        terminal.expect("Ready: penstock-concierge")
        logged = [line for line in terminal.lines() if " INFO " in line]
        assert len(logged) > 5
        assert all(re.match(r"\d{4}-\d\d-\d\d [\d:,]+ INFO penstock\.", line) for line in logged), logged
        assert "0/?" not in terminal.raw.decode("utf-8", "replace")
    finally:
        terminal.close()
