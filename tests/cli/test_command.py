"""The command as people call it: real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock import __version__
from penstock.cli.main import app
from penstock.cli.run import question_of
from tests.cli.conftest import Penstock


def test_help_names_every_command_and_version_the_version(penstock: Penstock) -> None:
    help = penstock("--help")
    assert help.returncode == 0
    for name in ("serve", "run", "generate", "bench", "doctor", "plan"):
        assert f" {name} " in help.stdout
    assert penstock("--version").stdout.strip() == f"penstock {__version__}"


def test_help_of_every_command_is_found(penstock: Penstock) -> None:
    short, whole = penstock("serve", "--help").stdout, penstock("serve", "--help-all").stdout
    assert "--scheduling-policy" not in short and "--scheduling-policy" in whole
    assert len(short.splitlines()) < 60
    bench = penstock("bench", "--help").stdout
    assert all(name in bench for name in ("latency", "throughput", "serve"))


@pytest.mark.parametrize(
    "arguments", [["--help"], ["serve", "--help"], ["run", "--help"], ["bench", "serve", "--help"]]
)
def test_help_imports_no_torch(arguments: list[str]) -> None:
    code = (
        "import sys; from penstock.cli.main import app\n"
        f"app({arguments!r}, standalone_mode=False)\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'penstock.llm', 'matplotlib')))"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


def test_a_wrong_command_or_flag_is_a_usage_error(penstock: Penstock) -> None:
    wrong = penstock("srve")
    assert wrong.returncode == 2
    assert "serve" in wrong.stderr
    assert penstock("serve", "--prot", "1").returncode == 2
    mistyped = penstock("serve", "--dtype", "flaot32")
    assert mistyped.returncode == 2
    assert "'flaot32' is none of auto, float32, bfloat16, float16. Did you mean 'float32'?" in mistyped.stderr


def test_names_of_flags_are_whole_in_a_narrow_terminal(penstock: Penstock) -> None:
    for command in (["serve"], ["run"], ["bench", "serve"]):
        told = penstock(*command, "--help-all", COLUMNS="60").stdout
        assert "…" not in told.replace("q… ", "").replace("iq… ", "")
        assert all(len(line) <= 100 for line in told.splitlines())
    assert "--gpu-memory-utilization" in penstock("run", "--help-all", COLUMNS="60").stdout


def test_an_unknown_model_says_what_was_looked_for(penstock: Penstock, tmp_path: Path) -> None:
    missing = str(tmp_path / "no-model")
    real = penstock("run", missing, "hi")
    assert real.returncode == 1
    told = [real.stderr]
    for command in (["generate", missing, "--prompt", "x"], ["plan", missing]):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 1
        told.append(result.stderr)
    for text in told:
        assert text.startswith("penstock: ")
        assert text.count("\n") == 1
        assert missing in text
        assert "penstock-concierge" in text


def test_an_error_shows_its_traceback_only_when_debugging(penstock: Penstock, tmp_path: Path) -> None:
    result = penstock("plan", str(tmp_path / "no-model"), PENSTOCK_LOG_LEVEL="debug")
    assert result.returncode == 1
    assert "Traceback" in result.stderr
    unknown = CliRunner().invoke(app, ["doctor"], env={"PENSTOCK_LOG_LEVEL": "loud"})
    assert unknown.exit_code == 1
    assert "PENSTOCK_LOG_LEVEL" in unknown.stderr


def test_doctor_reports_machine_kernels_and_model(penstock: Penstock) -> None:
    found = json.loads(penstock("doctor", "--json").stdout)
    assert found["penstock"] == __version__
    assert found["cpu"]["cores_usable"] >= 1
    assert found["memory"]["total_bytes"] >= found["memory"]["available_bytes"] > 0
    assert found["native_library"]["loaded"] == (found["native_library"]["why_not"] is None)
    assert found["bundled_model"]["present"]
    assert set(found["port"]) >= {"host", "port", "free"}
    ops = {entry["op"]: entry for entry in found["kernels"]["ops"]}
    assert {"linear", "paged_attention", "sampling"} <= set(ops)
    assert all(entry["implementation"] and entry["reason"] for entry in ops.values())


def test_plan_adds_up(penstock: Penstock) -> None:
    found = json.loads(penstock("plan", "--json", "--dtype", "bfloat16", "--max-model-len", "1024").stdout)
    sizes = found["bytes"]
    assert found["fits"]
    assert found["max_model_len"] == 1024
    assert found["weights_kept_as"] == ["bfloat16", "float32"]
    assert 2 * found["parameters"] <= sizes["weights_resident"] < 2.01 * found["parameters"]  # norms stay in float32
    assert sizes["weights_resident"] + sizes["kv_cache"] + sizes["activations"] == sizes["total"]
    assert sizes["available"] - sizes["total"] == sizes["free"]
    assert found["full_length_sequences"] >= 1


def test_a_plan_of_several_engines_is_that_of_one_of_them() -> None:
    asked = ["plan", "--max-model-len", "256", "--memory", "300MiB", "-dp", "2"]
    found = json.loads(CliRunner().invoke(app, [*asked, "--json"]).stdout)
    assert found["engines"] == 2
    assert 150 << 20 < found["bytes"]["available"] < 200 << 20  # half of it, and the weights that both map
    assert "of one of 2 engines" in CliRunner().invoke(app, asked).stdout


def test_a_plan_that_cannot_work_says_what_is_missing_and_the_remedy() -> None:
    refused = CliRunner().invoke(app, ["plan", "--kv-cache-memory", "900TiB"])
    assert refused.exit_code == 1
    assert "TiB are missing" in refused.stderr
    assert "--kv-cache-memory" in refused.stderr
    as_json = CliRunner().invoke(app, ["plan", "--kv-cache-memory", "900TiB", "--json"])
    assert as_json.exit_code == 1
    assert json.loads(as_json.stdout)["fits"] is False


def test_generate_gives_the_reference_tokens(penstock: Penstock, shared_data: Path) -> None:
    model = shared_data / "models" / "stories260K"
    golden = json.loads((model / "greedy.json").read_text(encoding="utf-8"))
    result = penstock(
        "generate", str(model / "hf"), "--prompt", golden["prompt"], "--temperature", "0", "--json",
        "--max-tokens", str(len(golden["greedy_ids"])), "--seed", "3",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["token_ids"] == golden["greedy_ids"]
    assert found["text"].startswith(golden["text"][:100])
    assert len(found["logprobs"]) == len(found["token_ids"])
    assert all(entry["rank"] == 1 and entry["logprob"] <= 0 for entry in found["logprobs"])
    assert found["usage"]["prompt_tokens"] == len(golden["prompt_ids"])
    assert found["usage"]["completion_tokens"] == len(golden["greedy_ids"])
    assert {"load_ms", "ttft_ms", "total_ms", "output_tokens_per_s"} == set(found["timings"])


def test_generate_streams_text_and_equal_seeds_agree() -> None:
    texts = []
    for seed in ("7", "7", "8"):
        command = ["generate", "--max-tokens", "12", "--temperature", "1", "--seed", seed]
        texts.append(CliRunner().invoke(app, command, input="I would like").stdout)
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].strip()


def test_run_answers_once_from_standard_input_and_from_arguments(penstock: Penstock) -> None:
    question = "I'm looking for a place to eat."
    piped = penstock("run", "--temperature", "0", input=question + "\n")
    asked = penstock("run", "penstock-concierge", *question.split(), "--temperature", "0")
    assert piped.returncode == asked.returncode == 0
    assert piped.stdout == asked.stdout == "What kind of food do you like?\n"
    assert piped.stderr == ""
    halves = penstock("run", "penstock-concierge", "I'm looking", "--temperature", "0", input="for a place to eat.\n")
    assert halves.returncode == 0
    assert halves.stdout.strip()
    broken = CliRunner().invoke(app, ["run"], input=b"\xff\xfe")
    assert broken.exit_code == 1
    assert "not UTF-8" in broken.stderr
    empty = CliRunner().invoke(app, ["run"], input="  \n")
    assert empty.exit_code == 1
    assert "no question" in empty.stderr


def test_run_says_what_to_do_with_a_model_that_cannot_chat_and_with_a_question_for_a_model(shared_data: Path) -> None:
    model = str(shared_data / "models" / "stories260K" / "hf")
    result = CliRunner().invoke(app, ["run", model, "hello"])
    assert result.exit_code == 1
    assert "penstock generate" in result.stderr
    for question in ("Get me a car", "hello"):
        result = CliRunner().invoke(app, ["run", question])
        assert result.exit_code == 1
        assert f"no model {question!r}" in result.stderr
        assert f"penstock run penstock-concierge {question!r}" in result.stderr


def test_a_question_is_the_arguments_then_standard_input() -> None:
    assert question_of(["Sum", "up:"], " a\nb \n") == "Sum up:\n\na\nb"
    assert question_of(["Sum up."], None) == question_of(["Sum up."], "\n") == "Sum up."
    assert question_of(None, "a\n") == "a"
    assert question_of(None, None) is None


def test_doctor_reports_the_instruction_set_that_would_be_used(penstock: Penstock) -> None:
    by_variable = json.loads(penstock("doctor", "--json", PENSTOCK_ISA="generic").stdout)
    by_flag = json.loads(penstock("doctor", "--json", "--isa", "generic", PENSTOCK_ISA="avx2").stdout)
    for found in (by_variable, by_flag):
        if found["native_library"]["loaded"]:
            assert found["native_library"]["in_use"] == "generic"
            ops = {entry["op"]: entry for entry in found["kernels"]["ops"]}
            assert (
                ops["sampling"]["implementation"] == ops["dequantize (at load)"]["implementation"] == "native (generic)"
            )
    slower = json.loads(penstock("doctor", "--json", "--dtype", "float16").stdout)
    for found in (by_variable, by_flag, slower):
        references = [op for op in found["kernels"]["ops"] if op["implementation"] == "reference"]
        assert bool(references) == (found is slower or not found["native_library"]["loaded"])
        assert all("the best" not in op["reason"] for op in references)
    refused = penstock("doctor", "--isa", "sse9")
    assert refused.returncode == 2
    assert "'sse9' is none of auto, generic, avx2" in refused.stderr


def test_serve_refuses_wrong_options_once_and_before_it_listens(penstock: Penstock) -> None:
    for flag, value in (("--threads", "0"), ("--drain-timeout", "-3"), ("--drain-timeout", "nan")):
        refused = penstock("serve", "--port", "0", flag, value)
        assert refused.returncode == 1
        assert refused.stdout == ""
        assert refused.stderr.startswith(f"penstock: {flag} is ")
        assert refused.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "flag", [("--threads", "0"), ("--max-users", "0"), ("--depth", "7"), ("--kv-cache-memory", "0")]
)
def test_a_value_out_of_range_is_refused_never_ignored(flag: tuple[str, str]) -> None:
    result = CliRunner().invoke(app, ["plan", *flag])
    assert result.exit_code == 1
    assert f"{flag[0]} is " in result.stderr
    assert "allowed: " in result.stderr


def test_a_bad_sampling_value_is_one_clear_line() -> None:
    result = CliRunner().invoke(app, ["run", "--temperature", "-1"], input="hi")
    assert result.exit_code == 1
    assert result.stderr.startswith("penstock: temperature is -1.0; allowed:")
