"""`penstock quantize`, `imatrix` and `perplexity` as people call them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gguf
import pytest
from typer.testing import CliRunner

from penstock.cli.main import app
from tests.cli.conftest import Penstock


@pytest.fixture(scope="module")
def stories(shared_data: Path) -> str:
    return str(shared_data / "models/stories260K/hf")


@pytest.fixture(scope="module")
def text(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "tale.txt"
    path.write_text((shared_data / "text/grimms.txt").read_text(encoding="utf-8")[:4000], encoding="utf-8")
    return str(path)


def test_quantise_measure_and_quantise_better(penstock: Penstock, stories: str, text: str, tmp_path: Path) -> None:
    matrix, output = tmp_path / "i.gguf", tmp_path / "m.gguf"
    collected = penstock(
        "imatrix", stories, "--text", text, "--output", str(matrix), "--context", "128", "--chunks", "4"
    )
    assert collected.returncode == 0, collected.stderr
    assert "36 weights over 4 stretches of 128 tokens" in collected.stdout
    made = penstock("quantize", stories, "--to", "Q4_0", "--output", str(output), "--imatrix", str(matrix))
    assert made.returncode == 0, made.stderr
    assert "Note: q4_0 has no use for an importance matrix; it is left out." in made.stderr
    assert "Note: blk.0.ffn_down.weight: rows of 172 are not whole q4_0 blocks; written as f16." in made.stderr
    assert made.stdout.startswith(f"{output}: 0.2 MiB (25% of 1.0 MiB before)")
    assert gguf.GGUFReader(output).fields["general.file_type"].contents() == 2
    measured = penstock("perplexity", str(output), "--text", text, "--context", "128", "--against", stories, "--json")
    assert measured.returncode == 0, measured.stderr
    figures = json.loads(measured.stdout)
    assert figures["context"] == 128 and figures["tokens"] == 63 * figures["windows"]
    assert 0.9 < figures["perplexity_ratio"] < 1.2
    assert 0 < figures["divergence"]["mean"] < 0.3
    assert figures["divergence"]["same_top"] > 0.7


def test_the_loss_of_a_kv_type_is_measured(penstock: Penstock, stories: str, text: str) -> None:
    about = ("--text", text, "--context", "128", "--chunks", "4", "--against", stories, "--json")
    measured = penstock("perplexity", stories, *about, "--kv-cache-dtype", "int8")
    assert measured.returncode == 0, measured.stderr
    assert 0 < json.loads(measured.stdout)["divergence"]["mean"] < 0.1


def test_perplexity_is_a_table_for_people(penstock: Penstock, stories: str, text: str) -> None:
    shown = penstock("perplexity", stories, "--text", text, "--context", "64", "--stride", "32", "--chunks", "5")
    assert shown.returncode == 0, shown.stderr
    assert "perplexity" in shown.stdout and "191 tokens in 5 stretches" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("quantize", "{stories}", "--to", "q8_0", "-o", "{text}"), "name ends in .gguf"),
        (("perplexity", "{stories}", "--text", "{text}", "--stride", "900"), "--stride is 900; allowed: 1 to "),
        (("generate", "--prompt", "hi", "--dtype", "bf16", "--kv-cache-dtype", "int8"), "Leave --dtype, --isa and"),
        (("quantize", "/nowhere", "--to", "q8_0"), "there is no model at '/nowhere'"),
        (("perplexity", "{stories}", "--text", "/nowhere"), "cannot be read as UTF-8 text"),
        (
            ("perplexity", "{stories}", "--text", "{text}", "-c", "9999"),
            "allowed: 2 to 512, the model's context length",
        ),
        (("imatrix", "{stories}", "--text", "{text}", "-o", "{text}"), "exists already"),
    ],
)
def test_mistakes_are_one_line(stories: str, text: str, arguments: tuple[str, ...], message: str) -> None:
    done = CliRunner().invoke(app, [argument.format(stories=stories, text=text) for argument in arguments])
    assert done.exit_code == 1
    assert message in done.stderr and len(done.stderr.splitlines()) == 1


def test_an_unknown_format_is_a_usage_error(stories: str) -> None:
    done = CliRunner().invoke(app, ["quantize", stories, "--to", "q4_km"])
    assert done.exit_code == 2
    assert "'q4_km' is none of f32, f16" in done.stderr and "Did you mean 'q4_k_m'?" in done.stderr


@pytest.mark.parametrize("command", ["perplexity", "imatrix"])
def test_an_unknown_architecture_is_told_first(stories: str, text: str, tmp_path: Path, command: str) -> None:
    model = shutil.copytree(stories, tmp_path / "model")
    config = json.loads((model / "config.json").read_text()) | {"architectures": ["FooForCausalLM"]}
    del config["hidden_size"]
    (model / "config.json").write_text(json.dumps(config))
    target = ("-o", str(tmp_path / "m.gguf")) if command == "imatrix" else ()
    done = CliRunner().invoke(app, [command, str(model), "--text", text, *target])
    assert done.exit_code == 1
    assert "architectures is ['FooForCausalLM']" in done.stderr and len(done.stderr.splitlines()) == 1
