"""`penstock draft train` as people call it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock import LLM
from penstock.cli.draft_prompts import read_prompts
from penstock.config.errors import ConfigError
from penstock.engine.text_pipeline import TextPipeline
from penstock.train.answers import Answer, AnswerFile
from tests.cli.conftest import Penstock

ASKED = ("I need a hotel in Paris.", "Find me a flight to Rome.", "Book a table for two.", "Play some music.")
FLAGS = (
    "--max-tokens",
    "12",
    "--max-model-len",
    "256",
    "--threads",
    "1",
    "--epochs",
    "2",
    "--starts",
    "8",
    "--drafts",
    "2",
)


@pytest.fixture(scope="module")
def concierge() -> TextPipeline:
    return TextPipeline.load("penstock-concierge")


def test_trains_and_drafts(penstock: Penstock, tmp_path: Path) -> None:
    text, output = tmp_path / "asked.txt", tmp_path / "head"
    text.write_text("\n\n".join(ASKED))
    command = ("draft", "train", "penstock-concierge", "--text", str(text), "-o", str(output), *FLAGS)
    made = penstock(*command)
    assert made.returncode == 0, made.stderr
    assert "step 2 of 2: loss " in made.stderr  # three answers are learned from, in one step
    assert "answers that were held out" in made.stdout
    assert not (tmp_path / "head.training").exists()
    used = json.dumps({"method": "eagle3", "model": str(output)})
    assert f"--speculative-config '{used}'" in re.sub(r"\s+", " ", made.stdout)
    asked = ("complete", "penstock-concierge", "-q", "I am", "--max-tokens", "8", "--temperature", "0")
    drafted, plain = penstock(*asked, "--speculative-config", used), penstock(*asked)
    assert drafted.returncode == 0, drafted.stderr
    assert drafted.stdout == plain.stdout
    again = penstock(*command)
    assert again.returncode == 1 and "exists already" in again.stderr


def test_goes_on_where_it_was_interrupted(penstock: Penstock, tmp_path: Path) -> None:
    text, output = tmp_path / "asked.txt", tmp_path / "head"
    text.write_text("\n\n".join(ASKED))
    command = ("draft", "train", "penstock-concierge", "--text", str(text), "-o", str(output), *FLAGS)
    endless = (*command[:-4], "--starts", "8", "--drafts", "2", "--epochs", "1000")
    process = subprocess.Popen([sys.executable, "-m", "penstock", *endless], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("step "):
            process.send_signal(signal.SIGINT)
            break
    rest = process.stderr.read()
    assert process.wait() == 130, rest
    assert "the same command goes on" in rest and "Traceback" not in rest
    other = penstock(*command)
    assert other.returncode == 1 and "with other settings (epochs)" in other.stderr
    text.write_text("Something else.\n\nAnd more.")
    other = penstock(*endless)
    assert other.returncode == 1 and "answers to another --text" in other.stderr


def test_prompts_of_files(concierge: TextPipeline, tmp_path: Path) -> None:
    lines = tmp_path / "asked.jsonl"
    chat = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]
    objects = [{"messages": [*chat, {"role": "user", "content": "A hotel."}, *chat[1:]]}, {"prompt": "Once"}]
    lines.write_text("".join(json.dumps(one) + "\n" for one in [*objects, {"turns": ["Hi.", "And?"]}]))
    found = read_prompts(lines, concierge, 10, 100).tokens
    decode = concierge.tokenizer.decode
    assert [decode(list(tokens)).endswith("assistant\n") for tokens in found] == [True, True, False, True]
    assert found[0] == found[3] and "Hello." in decode(list(found[1])) and decode(list(found[2])) == "Once"
    assert read_prompts(lines, concierge, 2, 100).tokens == found[:2]
    shorter = read_prompts(lines, concierge, 10, len(found[1]) - 1)
    assert (len(shorter.tokens), shorter.too_long) == (3, 1)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "line 1 of"),
        ("[]", "it is no object"),
        ("{}", "messages, turns or prompt is needed"),
        ('{"messages": [1]}', "line 1 of"),
        ("", "no prompt that can be answered"),
        ("[" * 100_000, "line 1 of"),
    ],
)
def test_files_that_ask_nothing(content: str, why: str, concierge: TextPipeline, tmp_path: Path) -> None:
    path = tmp_path / "asked.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=why):
        read_prompts(path, concierge, 10, 100)


def test_drawn_answers_are_measured_by_greedy_ones(penstock: Penstock, tmp_path: Path) -> None:
    text, output = tmp_path / "asked.txt", tmp_path / "head"
    text.write_text("\n\n".join(ASKED))
    asked = ("penstock-concierge", "--text", str(text), "-o", str(output), *FLAGS, "--learning-rate", "0.5")
    place = tmp_path / "head.training"
    place.mkdir()
    (place / "state.npz").write_text("of another training")  # so that it ends behind the answers
    made = penstock("draft", "train", *asked, "--temperature", "2")
    assert made.returncode == 1 and "cannot be gone on with" in made.stderr, made.stderr
    kept, answers = (AnswerFile(place / f"{name}.jsonl").answers for name in ("greedy", "answers"))
    with LLM("penstock-concierge", max_model_len=256, threads=1) as llm:
        greedy = llm.generate([list(answers[1].prompt)], temperature=0, max_tokens=12)
    assert kept == [Answer(answers[1].prompt, greedy[0].outputs[0].token_ids)] != answers[1:2]


def test_what_cannot_be_trained(penstock: Penstock, tmp_path: Path) -> None:
    text = tmp_path / "asked.txt"
    text.write_text("Hi.\n\nHo.")
    (tmp_path / "cut.training").mkdir()
    (tmp_path / "cut.training" / "asked.json").write_text('{"tex')
    for flags, why in (
        (("--method", "mtp"), "--method is 'mtp'; allowed: eagle3, p-eagle, medusa"),
        (("--drafts", "99"), "--drafts is 99; allowed: 1 to 16"),
        (("--text", str(tmp_path / "none")), "cannot be read: No such file"),
        (("--text", "/dev/zero"), "is no plain file"),
        (("--max-tokens", "9999", "--max-model-len", "256"), "--max-tokens is 9999; the model has room for 256"),
        (("-o", "/"), "give the name of what is to be written there"),
        (("-o", str(tmp_path), "--force"), "it is not replaced"),
        (("-o", str(tmp_path / "cut")), "asked.json cannot be read"),
    ):
        command = ("draft", "train", "penstock-concierge", "--text", str(text), "-o", str(tmp_path / "head"), *flags)
        refused = penstock(*command)
        assert refused.returncode == 1 and why in refused.stderr, refused.stderr
