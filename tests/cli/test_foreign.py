"""Command lines of other engines: every flag has an answer, and every answer is true of our own flags."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from penstock.cli.foreign.serve_command import UNNEEDED
from penstock.cli.foreign.table import ENGINES, ForeignFlag, flags_of
from penstock.cli.main import load_command
from penstock.cli.migrate import migrated
from penstock.config.errors import ConfigError
from penstock.config.speculation import Speculation, speculation
from tests.cli.conftest import Penstock

FLAGS = [(engine, flag) for engine in ENGINES for flag in flags_of(engine).values()]


def own_flags() -> dict[str, Any]:
    command = load_command("serve")
    context = command.make_context("serve", [], resilient_parsing=True)
    return {
        name: parameter
        for parameter in command.get_params(context)
        for name in (*parameter.opts, *parameter.secondary_opts)
    }


def test_what_is_the_same_here_is_a_flag_here_and_takes_as_much() -> None:
    ours = {**own_flags(), "--config": None, "--help": None, "-h": None}
    for engine, flag in FLAGS:
        if flag.word == "same":
            assert flag.name in ours, (engine, flag)
            if (parameter := ours[flag.name]) is not None:
                assert bool(flag.values) != bool(getattr(parameter, "is_flag", False)), (engine, flag)


def sample(flag: ForeignFlag) -> str:
    if "{[]}" in flag.about:
        return '["https://a.example"]'
    pairs = re.search(r"{([^}]*=[^}]*)}", flag.about)
    return pairs[1].split("=", 1)[0] if pairs else "3"


def test_what_is_spelt_otherwise_here_is_taken_here() -> None:
    """Every spelling is parsed by our own command."""
    command = load_command("serve")
    for engine, flag in FLAGS:
        if flag.word == "as":
            words = flag.ours(sample(flag))
            assert words, (engine, flag)
            if words != ["--help"]:
                command.make_context("serve", list(words))


def test_every_answer_says_something_and_names_flags_that_there_are() -> None:
    ours = {*own_flags(), "--config", "--help"}
    for engine, flag in FLAGS:
        assert flag.word == "same" or len(flag.about) > 1, (engine, flag)
        if flag.word in ("no", "nothing"):
            assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", flag.about)) <= ours, (engine, flag.about)
            assert flag.about.endswith("."), flag.about


@pytest.mark.parametrize(
    ("line", "ours", "said"),
    [
        (
            "vllm serve Qwen/Qwen3-8B --max_model_len 8192 --served-model-name a b -tp 2 --node-rank 2 --seed=5",
            "penstock serve Qwen/Qwen3-8B --max-model-len 8192 --served-model-name a --alias b -tp 2 --seed 5",
            ("--node-rank 2 is left out. Processes of one machine", "vLLM listens on every address"),
        ),
        (
            "VLLM_API_KEY=k python3 -m vllm.entrypoints.openai.api_server --model m --host 0.0.0.0 -q awq --no-such 1",
            "PENSTOCK_API_KEY=k penstock serve m --host 0.0.0.0",
            ("-q awq is left out: the model's files say it.", "--no-such: vLLM has no such flag"),
        ),
        (
            "python -m sglang.launch_server --model-path m --context-length 4096 --disable-radix-cache",
            "penstock serve m --max-model-len 4096 --no-enable-prefix-caching --port 30000",
            ("--context-length 4096 is --max-model-len 4096.",),
        ),
        (
            "./bin/llama-server -m 'my model.gguf' -c 4096 \\\n -np 4 -ngl 99 --temp 0.7 -ctk q8_0 --api-key a,b",
            "penstock serve 'my model.gguf' --max-model-len 4096 --max-num-seqs 4 --temp 0.7 --kv-cache-dtype int8 "
            "--api-key a --api-key b --port 8080",
            ("-ngl 99 is left out. --device cuda",),
        ),
        (
            "MODEL_ID=a/b MAX_TOTAL_TOKENS=4096 HF_TOKEN=t text-generation-launcher --quantize bitsandbytes "
            "--num-shard 2 "
            "--port 80",
            "HF_TOKEN=t penstock serve a/b --max-model-len 4096 --quantize int8 --port 80",
            ("--quantize bitsandbytes is --quantize int8.", "--num-shard 2 is left out."),
        ),
        (
            "vllm serve m --kv-cache-dtype nvfp4 --host 1.2.3.4",
            "penstock serve m --host 1.2.3.4",
            ("--kv-cache-dtype nvfp4 is left out: that value has no like here",),
        ),
        (
            "llama-server -m m --port 1 --control-vector-layer-range 2 5 --control-vector v.gguf",
            "penstock serve m --port 1 --control-vector-layers 2-5 --control-vector v.gguf",
            ("--control-vector-layer-range 2 5 is --control-vector-layers 2-5.",),
        ),
        (
            "vllm serve m --kv-offloading-size 0.5 --kv-offloading-backend native --host 1.2.3.4 "
            """--kv-transfer-config '{"kv_connector": "NixlConnector"}'""",
            "penstock serve m --kv-ram 0.5GiB --host 1.2.3.4",
            ("--kv-offloading-size 0.5 is --kv-ram 0.5GiB.", "NixlConnector, MooncakeConnector and"),
        ),
        (
            "llama-server -m m --port 1 -cram 8192",
            "penstock serve m --port 1 --kv-ram 8192MiB",
            ("-cram 8192 is --kv-ram 8192MiB.",),
        ),
        (
            "llama-server -m m --port 1 --cache-ram 0",
            "penstock serve m --port 1",
            ("left out: nothing is kept unless",),
        ),
        ("llama-server -m m --port 1 --cache-ram -1", "penstock serve m --port 1", ("that value has no like here",)),
        (
            "sglang serve --model-path m --port 1 --enable-hierarchical-cache --hicache-ratio 2 --hicache-size 100 "
            "--hicache-write-policy write_through --hicache-mem-layout page_first --hicache-storage-backend file",
            "penstock serve m --port 1 --kv-ram 100GB",
            (
                "--hicache-size 100 is --kv-ram 100GB.",
                "a size or an address is what turns them on",
                "is --kv-disk SIZE here",
            ),
        ),
        (
            "LMCACHE_REMOTE_URL=redis://cache:6379 LMCACHE_MAX_LOCAL_CPU_SIZE=5.0 LMCACHE_LOCAL_CPU=True "
            "LMCACHE_LOCAL_DISK=file:///kept LMCACHE_MAX_LOCAL_DISK_SIZE=50 LMCACHE_ENABLE_P2P=1 vllm serve m "
            """--host 1.2.3.4 --kv-transfer-config '{"kv_connector": "LMCacheConnectorV1"}'""",
            "penstock serve m --kv-store redis://cache:6379 --kv-ram 5.0GB --kv-disk-path /kept --kv-disk 50GB "
            "--host 1.2.3.4",
            ("LMCACHE_REMOTE_URL is --kv-store.", "LMCACHE_ENABLE_P2P: nothing here", "and, for a remote_url in Redis"),
        ),
        (
            "LMCACHE_REMOTE_URL=lm://cache:65432 LMCACHE_LOCAL_DISK=x vllm serve m --host 1.2.3.4",
            "penstock serve m --kv-store lm://cache:65432 --host 1.2.3.4",
            ("LMCACHE_REMOTE_URL is --kv-store.", "--kv-disk SIZE keeps copies on disk"),
        ),
        ("sglang serve --model-path m --port 1 x", "penstock serve m --port 1", ("'x' stands alone",)),
    ],
)
def test_command_lines(line: str, ours: str, said: tuple[str, ...]) -> None:
    made = migrated(line)
    assert made.line == ours
    for text in said:
        assert any(text in note for note in made.notes), made.notes
    typed = made.line.partition("penstock serve ")[2]
    load_command("serve").make_context("serve", shlex.split(typed))


@pytest.mark.parametrize("line", ["", "ollama serve", "vllm bench serve", "vllm serve 'm", "x" * 70_000])
def test_what_starts_nothing_that_is_known(line: str) -> None:
    with pytest.raises(ConfigError):
        migrated(line)


def test_migrate_prints_and_reads_modelfiles(penstock: Penstock, tmp_path: Path) -> None:
    told = penstock("migrate", "vllm serve m --port 81 --swap-space 4")
    assert told.returncode == 0
    assert told.stdout.splitlines()[:2] == [
        "penstock serve m --port 81",
        "# --swap-space 4 is left out. A sequence that gives way finds what it had computed again, with --kv-ram SIZE "
        "after it left the device too.",
    ]
    assert penstock("migrate", "rm -rf /").returncode == 1
    file = tmp_path / "Modelfile"
    file.write_text("FROM llama3\nPARAMETER temperature 0.1\n")
    made = penstock("migrate", str(file)).stdout.splitlines()
    assert made[0] == shlex.join(["penstock", "create", tmp_path.name.lower(), "-f", str(file)])


def context_of(*words: str) -> Any:
    return load_command("serve").make_context("serve", list(words))


def test_flags_of_others_on_our_own_command() -> None:
    """Underscores and several names are read, what is not needed is left out and said, the rest is answered."""
    context = context_of(
        "m", "--max_model_len=64", "--served-model-name", "a", "b", "c", "--swap-space", "4", "--port", "1"
    )
    assert (context.params["model"], context.params["max_model_len"]) == ("m", 64)
    assert (context.params["served_model_name"], context.params["aliases"]) == ("a", ["b", "c"])
    assert len(context.meta[UNNEEDED]) == 1
    assert context.meta[UNNEEDED][0].startswith("--swap-space is not needed: A sequence that gives way")
    assert context_of("m", "--enable-auto-tool-choice").meta[UNNEEDED][0].startswith("--enable-auto-tool-choice is not")
    context = context_of("m", "--logits-processors", "a:b", "c=d:e", "--served-model-name", "x", "y")
    assert context.params["logits_processors"] == ["a:b", "c=d:e"] and context.params["aliases"] == ["y"]
    context = context_of("m", "--control-vector-layer-range", "2", "5", "--lora-modules", "a=b", "c=d", "--port", "1")
    assert context.params["control_vector_layers"] == "2-5" and context.params["lora_modules"] == ["a=b", "c=d"]
    assert context_of("m", "--chat-template", "-tp {{ x }}").params["chat_template"] == "-tp {{ x }}"
    assert context_of("m", "--tensor_parallel_size", "2", "-pp", "3").params["pipeline_parallel_size"] == 3
    for name in ("-tp", "--tp", "--tp-size"):
        assert context_of("m", name, "2").params["tensor_parallel_size"] == 2
    for words, said in (
        (("--trust-remote-code",), "never run"),
        (("--nnodes=2",), "-tp N"),
        (("-sm", "row"), "-tp N"),
        (("-c", "4096"), "--max-model-len"),
        (("--context-length=4096",), "SGLang"),
    ):
        with pytest.raises(typer.BadParameter) as refused:
            context_of("m", *words)
        assert said in str(refused.value)


def test_the_table_is_printed(penstock: Penstock) -> None:
    told = penstock("serve", "--help-flags", "llama-server")
    assert told.returncode == 0
    assert re.search(r"^--ctx-size +here: --max-model-len …$", told.stdout, re.MULTILINE)
    assert penstock("serve", "--help-flags=mlx").returncode == 2
    assert penstock("serve", "m", "--enable-elastic-ep").returncode == 2


def test_odd_command_lines_are_read_to_their_end(penstock: Penstock) -> None:
    assert "--max-model-len 4096" in migrated("llama-server -m x.gguf '' -c 4096 --port 9000").line
    assert "--port 9000" in migrated("llama-server -m x.gguf '' -c 4096 --port 9000").line
    deep = migrated("vllm serve m --allowed-origins '" + "[" * 60_000 + "'")
    assert any("--allowed-origins" in note for note in deep.notes)
    long = penstock("migrate", "llama-server -m x.gguf " + "--ctx-size 4096 --jinja " * 14)
    assert long.returncode == 0, long.stderr
    assert long.stdout.startswith("penstock serve x.gguf")


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (["--draft_max", "4", "-md", "d"], {"num_speculative_tokens": 4, "model": "d"}),
        (["--spec_draft_n_max=4", "--model_draft", "a_b"], {"num_speculative_tokens": 4, "model": "a_b"}),
        (["-sc", '{"method":"suffix"}', "--draft-max", "4"], {"method": "suffix", "num_speculative_tokens": 4}),
        (["-sc.method", "suffix", "-sc.num_speculative_tokens=4"], {"method": "suffix", "num_speculative_tokens": 4}),
        (["--spec-type", "draft-eagle3", "-md", "d"], {"method": "draft-eagle3", "model": "d"}),
        (["-md", "123"], {"model": "123"}),
        (["-md=true"], {"model": "true"}),
        (["-sc.model", '{"a": 1}'], {"model": '{"a": 1}'}),
        (["--speculative_config.model", '"small"'], {"model": "small"}),
    ],
)
def test_drafts_in_the_words_of_others(words: list[str], asked: dict[str, Any]) -> None:
    assert json.loads(context_of("m", *words).params["speculative_config"]) == asked


def test_members_of_objects_are_given_one_by_one() -> None:
    words = ["--hf-overrides", '{"rope_theta": 1, "a": {"b": 2}}', "--hf_overrides.a.c=3", "--hf-overrides.rope_theta"]
    context = context_of("m", *words, "5e5", "--pooler-config.pooling_type", "MEAN", "--hf-overrides.list+", "x")
    assert json.loads(context.params["hf_overrides"]) == {"rope_theta": 5e5, "a": {"b": 2, "c": 3}, "list": ["x"]}
    assert json.loads(context.params["pooler_config"]) == {"pooling_type": "MEAN"}
    made = migrated("vllm serve m --hf-overrides.rope_scaling.factor 4 --rope-theta 10 --pooler-config.dimensions 8")
    assert made.line == (
        'penstock serve m --hf-overrides.rope_theta 10 --hf-overrides \'{"rope_scaling": {"factor": 4}}\' '
        "--pooler-config '{\"dimensions\": 8}'"
    )
    context = context_of("m", "-md", "small.gguf", "--draft-max=8", "--draft-min", "2", "--draft-p-min", "0.6")
    drafts = {"model": "small.gguf", "num_speculative_tokens": 8, "draft_min": 2, "draft_p_min": 0.6}
    assert json.loads(context.params["speculative_config"]) == drafts
    assert speculation(context.params["speculative_config"]) == Speculation(
        "draft_model", 8, model="small.gguf", draft_min=2, draft_p_min=0.6
    )
    made = migrated("llama-server -m x.gguf --model-draft d.gguf --draft-max 3")
    assert "x.gguf --speculative-config.model d.gguf --speculative-config.num_speculative_tokens 3 " in made.line
    for wrong in (["--hf-overrides.a"], ["--hf-overrides..a", "1"], ["--hf-overrides." + "a." * 20 + "b", "1"]):
        with pytest.raises(typer.BadParameter):
            context_of("m", *wrong)
    with pytest.raises(typer.BadParameter, match="no object"):
        context_of("m", "--hf-overrides.a", "1", "--hf-overrides.a.b", "2")
    with pytest.raises(typer.BadParameter, match="no list"):
        context_of("m", "--hf-overrides.a", "1", "--hf-overrides.a+", "2")
