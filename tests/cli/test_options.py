"""Flags become options."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from penstock.cli.options import (
    parse_bytes,
    takes_freely_seeded_engine_options,
    takes_named_engine_options,
    takes_sampling,
    takes_server_options,
)
from penstock.config.options import EngineOptions, ServerOptions


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1048576", 2**20),
        ("2GiB", 2**31),
        ("1.5g", 3 * 2**29),
        ("512 MiB", 2**29),
        ("3MB", 3_000_000),
        ("7k", 7168),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "2XB", "1e9", "2GiBs"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse_bytes(text)


def parsed(*arguments: str, **variables: str) -> tuple[EngineOptions, ServerOptions, dict[str, object]]:
    found: list[tuple[EngineOptions, ServerOptions, dict[str, object]]] = []
    app = typer.Typer()

    @app.command()
    @takes_named_engine_options
    @takes_server_options
    @takes_sampling
    def show(engine: EngineOptions, server: ServerOptions, sampling: dict[str, object]) -> None:
        found.append((engine, server, sampling))

    clean = {"PENSTOCK_MODEL": "", "PENSTOCK_ISA": "", "PENSTOCK_THREADS": "", "PENSTOCK_API_KEY": "", **variables}
    result = CliRunner().invoke(app, list(arguments), env=clean)
    assert result.exit_code == 0, result.output
    return found[0]


def test_without_flags_every_option_has_its_default() -> None:
    engine, server, sampling = parsed()
    assert engine == EngineOptions()
    assert server == ServerOptions()
    assert sampling == {"ignore_eos": False}


def test_every_option_has_a_flag(tmp_path: Path) -> None:
    (tmp_path / "system.txt").write_text("Be brief.\n", encoding="utf-8")
    given = {
        "served_model_name": "name", "device": "cpu", "dtype": "bfloat16", "isa": "avx2", "threads": 3,
        "max_model_len": 99, "max_num_seqs": 7, "max_num_batched_tokens": 70, "max_chunk_tokens": 20, "block_size": 32,
        "goal": "latency", "max_users": 4, "tensor_parallel_size": 2, "pipeline_parallel_size": 3, "remote_workers": 2,
        "decode_context_parallel_size": 2, "prefill_context_parallel_size": 2,
        "workers_address": "10.0.0.1:7000", "distributed_executor_backend": "ray", "pipeline_layer_split": "1,2,3",
        "num_redundant_experts": 2, "eplb_step_interval": 30,
        "kv_cache_memory": 2**20, "memory": 2**30, "kv_blocks": 12, "depth": 1, "seed": 5, "kv_cache_dtype": "int8",
        "pack_cache": "off", "pack_cache_size": 2**20, "load_format": "dummy", "quantize": "q8_0", "arithmetic": "fast",
        "tool_call_parser": "hermes", "reasoning_parser": "qwen3", "gpu_memory_utilization": 0.5,
        "max_logprobs": -1, "logprobs_mode": "raw_logits", "hf_overrides": '{"rope_theta": 5.0}',
        "watermark_key": 42, "speculative_config": '{"method": "ngram"}', "pooler_config": '{"dimensions": 4}',
        "kv_ram": 2**22, "kv_disk": 2**23, "kv_disk_path": "kept",
        "data_parallel_size": 3, "routing_policy": "session",
            "kv_events_config": '{"publisher": "zmq"}', "prefix_caching_hash_algo": "sha256",
        "kv_store": "redis://cache:6379/1", "kv_store_seconds": 60,
        "max_loras": 3, "max_lora_rank": 32, "max_cpu_loras": 9, "max_lora_bytes": 2**21,
        "control_vector": "a.gguf:2", "control_vector_layers": "1-2",
    }  # fmt: skip
    flags = [word for name, value in given.items() for word in ("--" + name.replace("_", "-"), str(value))]
    flags += ["--no-enable-prefix-caching", "--batch-invariant", "--enforce-eager", "--scheduling-policy", "priority"]
    flags += ["--enable-lora", "--enable-prompt-embeds", "--enable-expert-parallel", "--enable-eplb"]
    flags += ["--share-prefix-cache", "--shared-prompt", str(tmp_path / "system.txt")]
    flags += ["--logits-processors", "a:B", "--logits-processors", "c=d:e"]
    engine, _, _ = parsed("/", *flags)
    changed = {field.name for field in fields(EngineOptions) if getattr(engine, field.name) != field.default}
    assert changed == {field.name for field in fields(EngineOptions)}
    assert engine.kv_cache_memory == 2**20 and engine.shared_prompts == ("Be brief.",)
    assert engine.logits_processors == ("a:B", "c=d:e")
    assert parsed("--async-scheduling")[0].depth == 1
    _, server, _ = parsed(
        "--host", "::1", "--port", "0", "--api-key", "a", "--api-key", "b", "--drain-timeout", "2",
        "--allowed-origins", "http://one", "--allowed-origins", "http://two", "--trust-request-chat-template",
        "--max-queue-seconds", "4", "--api-server-count", "3", "--any-model", "--alias", "a,b", "--alias", "c",
        "--slot-save-path", "saved",
        "--no-slots", "--props", "--chat-template", "{{ messages }}", "--uds", "/run/s", "--root-path", "/a",
        "--enable-force-include-usage", "--return-tokens-as-token-ids", "--grpc-port", "8001",
        "--moderation-model", "guard", "--mcp-servers", "mcp.json",
        "--lora-modules", "a=b", "--lora", "c:0.5",
    )  # fmt: skip
    origins = ("http://one", "http://two")
    assert server == ServerOptions(
        *("::1", 0, ("a", "b"), 2.0, 4.0),
        allowed_origins=origins,
        trust_request_chat_template=True,
        api_server_count=3,
        any_model=True,
        aliases=("a", "b", "c"),
        slots=False,
        slot_save_path="saved",
        props=True,
        chat_template="{{ messages }}",
        uds="/run/s",
        root_path="/a",
        force_include_usage=True,
        tokens_as_ids=True,
        grpc_port=8001,
        moderation_model="guard",
        mcp_servers="mcp.json",
        lora_modules=("a=b",),
        lora=("c:0.5",),
    )
    _, server, _ = parsed("--lora-modules", "a=b", "--lora-modules", "c=d", "--lora-pin", "c")
    assert [json.loads(module)["pinned"] for module in server.lora_modules] == [False, True]
    (tmp_path / "chat.jinja").write_text("{{ 1 }}", encoding="utf-8")
    assert parsed("--chat-template-file", str(tmp_path / "chat.jinja"))[1].chat_template == "{{ 1 }}"


def test_the_environment_fills_in_and_flags_come_first() -> None:
    variables = {"PENSTOCK_MODEL": "/", "PENSTOCK_ISA": "avx2", "PENSTOCK_THREADS": "2", "PENSTOCK_API_KEY": "x,y"}
    engine, server, _ = parsed(**variables)
    assert (engine.model, engine.isa, engine.threads, server.api_keys) == ("/", "avx2", 2, ("x", "y"))
    engine, server, _ = parsed(".", "--isa", "generic", "--threads", "1", "--api-key", "z", **variables)
    assert (engine.model, engine.isa, engine.threads, server.api_keys) == (".", "generic", 1, ("z",))


def test_a_chat_has_a_fresh_seed_unless_one_is_given() -> None:
    found: list[int] = []
    app = typer.Typer()

    @app.command()
    @takes_freely_seeded_engine_options
    def show(engine: EngineOptions) -> None:
        found.append(engine.seed)

    for arguments in ([], [], ["--seed", "0"], ["--seed", "7"]):
        assert CliRunner().invoke(app, arguments).exit_code == 0
    assert len(set(found)) == 4
    assert found[2:] == [0, 7]


def test_sampling_holds_only_what_was_given() -> None:
    *_, sampling = parsed("--temperature", "0", "--stop", "a", "--stop", "b", "--max-tokens", "3")
    assert sampling == {"temperature": 0.0, "stop": ("a", "b"), "max_tokens": 3, "ignore_eos": False}
