"""The arithmetic and parsing of the comparison with other engines, and its model files' bookkeeping: never timings."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import gguf
import numpy
import pytest

from benchmarks.cpu import peer_install, peer_models, peer_plot, peer_serving, peer_startup, peer_works, peers
from benchmarks.cpu.peer_engines import Run, prompts
from benchmarks.cpu.peer_install import Places
from benchmarks.cpu.peer_models import SHAPES
from penstock.text.gguf_vocab import read_gguf_vocab


def test_works_are_read_from_their_names() -> None:
    assert peer_works.parse_work("prefill512") == peer_works.Work("prefill512", "prefill", 512, 1, 1)
    assert peer_works.parse_work("batch16").sequences == 16
    assert peer_works.parse_work("decode4096").prompt == 4096
    for wrong in ("prefill", "decode0", "train5", "batch16x"):
        with pytest.raises(ValueError, match="unknown work"):
            peer_works.parse_work(wrong)


def test_prefill_counts_prompt_tokens_until_the_first_token() -> None:
    assert peer_works.rate(peer_works.parse_work("prefill500"), 2.0, [[4.0]]) == 250.0


def test_decode_counts_tokens_after_the_first() -> None:
    work = peer_works.parse_work("decode64")
    assert peer_works.rate(work, 0.0, [[5.0 + 0.5 * i for i in range(65)]]) == pytest.approx(2.0)


def test_a_batch_counts_only_while_all_sequences_decode() -> None:
    work = peer_works.parse_work("batch2")
    early = [1.0 + i for i in range(33)]
    late = [3.0 + i for i in range(33)]
    # from 3 (both have their first) to 33 (one ends): 30 steps of two tokens
    assert peer_works.rate(work, 0.0, [early, late]) == pytest.approx(2.0)


def test_missing_tokens_are_an_error() -> None:
    with pytest.raises(ValueError, match="asked for 2 x 33"):
        peer_works.rate(peer_works.parse_work("batch2"), 0.0, [[1.0] * 33, [1.0] * 32])


def test_llama_commands_ask_for_the_same_work() -> None:
    program, arguments = peer_works.llama_command(peer_works.parse_work("decode4096"), "m.gguf", 2)
    assert program == "llama-bench"
    assert arguments[arguments.index("-d") + 1] == "4096"
    assert arguments[arguments.index("-p") + 1] == "0"
    program, arguments = peer_works.llama_command(peer_works.parse_work("batch32"), "m.gguf", 2)
    assert program == "llama-batched-bench"
    assert arguments[arguments.index("-c") + 1] == str(32 * 96)
    program, arguments = peer_works.llama_command(peer_works.parse_work("prefill2048"), "m.gguf", 2)
    assert arguments[arguments.index("-p") + 1] == "2048"
    assert arguments[arguments.index("-n") + 1] == "0"


def test_llama_output_is_read() -> None:
    bench = json.dumps([{"n_prompt": 512, "avg_ts": 423.2, "samples_ts": [423.2]}])
    assert peer_works.llama_rate(peer_works.parse_work("prefill512"), bench) == 423.2
    line = json.dumps({"pp": 64, "tg": 32, "pl": 16, "speed_pp": 467.7, "speed_tg": 213.87})
    assert peer_works.llama_rate(peer_works.parse_work("batch16"), f"main: warm\n{line}\n\n") == 213.87
    with pytest.raises(ValueError, match="0 results"):
        peer_works.llama_rate(peer_works.parse_work("batch16"), "main: failed\n")
    with pytest.raises(ValueError, match="2 results"):
        peer_works.llama_rate(peer_works.parse_work("decode64"), json.dumps([{"avg_ts": 1}, {"avg_ts": 2}]))


def test_ratios_compare_medians_with_the_best_peer() -> None:
    rates = {
        "penstock": [30.0, 10.0, 20.0],
        "penstock fast": [40.0],
        "llama.cpp": [5.0, 9.0],
        "openvino": [10.0],
        "vllm": [],
    }
    found = peer_works.summary(rates)
    assert found["best_peer"] == "openvino"
    assert found["ratios"] == {"penstock": 2.0, "penstock fast": 4.0}
    assert found["engines"]["llama.cpp"] == {"median": 7.0, "least": 5.0, "most": 9.0, "runs": [5.0, 9.0]}
    assert "vllm" not in found["engines"]
    assert peer_works.summary({"penstock": [1.0]})["ratios"] == {}


def test_newer_rows_replace_older_ones_and_the_table_keeps_engines_apart() -> None:
    def row(work: str, rates: dict[str, list[float]]) -> dict[str, object]:
        return {"model": "m", "format": "q8_0", "work": work, "weights": {}, **peer_works.summary(rates)}

    old = [row("decode64", {"vllm": [1.0]}), row("batch16", {"vllm": [2.0]})]
    newer = row("decode64", {"penstock": [9.0], "llama.cpp": [3.0]})
    newer |= {"weight_bytes": 2_000_000_000, "weights": {"penstock": "q8_0", "vllm": "bf16"}}
    rows = peer_works.merge(old, [newer])
    assert [one["work"] for one in rows] == ["decode64", "batch16"]
    columns, cells = peer_works.table(rows)
    assert columns[3:] == ["penstock", "llama.cpp", "vllm", "best peer", "Penstock / best", "weights, GB/s"]
    assert cells == [
        ["m", "q8_0 (vllm bf16)", "decode64", 9.0, 3.0, "-", "llama.cpp", "3.00", "18.0"],
        ["m", "q8_0", "batch16", "-", "-", 2.0, "vllm", "-", "-"],
    ]


def test_the_plot_shows_every_work(tmp_path: Path) -> None:
    rows = [
        {"model": "m", "format": "f", "work": work, **peer_works.summary({"penstock": [2.0], "vllm": [1.0, 1.5]})}
        for work in peer_works.WORKS[:4]
    ]
    peer_plot.plot(rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_prompts_differ_by_round_and_repeat_by_seed() -> None:
    work = peer_works.parse_work("batch4")
    first, second = prompts(work, 5000, 1), prompts(work, 5000, 2)
    assert first == prompts(work, 5000, 1)
    assert len({tuple(prompt) for prompt in first + second}) == 8
    assert all(1000 <= token < 4700 for prompt in first for token in prompt)


def test_shapes_have_their_known_sizes(shared_data: Path) -> None:
    assert peer_models.parameters(SHAPES["qwen3-0.6b"]) == 596_049_920
    assert peer_models.parameters(SHAPES["llama-3.2-1b"]) == 1_235_814_400
    assert peer_models.parameters(SHAPES["llama-3.1-8b"]) == 8_030_261_248
    cut = peer_models.vocabulary(SHAPES["qwen3-moe-eighth"], shared_data)
    assert len(cut["tokenizer.ggml.tokens"]) == 18_992
    assert read_gguf_vocab(cut).backend.get_vocab_size() == 18_992


def test_one_model_has_the_same_weights_in_every_file() -> None:
    embedding, *rest = list(peer_models.tensors(SHAPES["qwen3-moe-eighth"]))[:5]
    assert embedding.gguf == "token_embd.weight"
    query = next(tensor for tensor in rest if "q_proj" in tensor.hf)
    assert peer_models.draw(query).equal(peer_models.draw(query))
    assert abs(peer_models.draw(query).float().std().item() - peer_models.DEVIATION) < 1e-3


def test_weights_read_by_a_token_leave_out_a_table_only_looked_up(tmp_path: Path) -> None:
    def written(name: str, *tensors: str) -> Path:
        writer = gguf.GGUFWriter(tmp_path / name, "llama")
        for tensor in tensors:
            writer.add_tensor(tensor, numpy.ones((4, 8), numpy.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return tmp_path / name

    assert peer_models.decode_bytes(written("tied", "token_embd.weight", "blk.0.attn_q.weight")) == 2 * 128
    apart = written("apart", "token_embd.weight", "blk.0.attn_q.weight", "output.weight")
    assert peer_models.decode_bytes(apart) == 2 * 128
    assert peer_models.decode_bytes(written("moe", "token_embd.weight", "blk.0.ffn_up_exps.weight")) is None
    assert peer_models.decode_bytes(tmp_path / "absent") is None


def test_tile_configuration_is_guarded_once(tmp_path: Path) -> None:
    file = tmp_path / "ggml" / "src" / "ggml-cpu" / "amx" / "mmq.cpp"
    file.parent.mkdir(parents=True)
    file.write_text("    _tile_loadconfig(&tc);\n", encoding="utf-8")
    peer_install.protect_tiles(tmp_path)
    peer_install.protect_tiles(tmp_path)
    assert file.read_text(encoding="utf-8").count("asm volatile") == 1
    file.write_text("nothing", encoding="utf-8")
    with pytest.raises(ValueError, match="0 calls"):
        peer_install.protect_tiles(tmp_path)


def test_unknown_peers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"llama\.cpp, openvino, vllm"):
        peer_install.install(Places(tmp_path), ["ollama"])


def test_penstock_engines_are_named_with_their_options() -> None:
    assert peers.named_options('fast:{"dtype": "bfloat16"}') == ("penstock fast", {"dtype": "bfloat16"})
    for wrong in ("fast", "fast:", "fast:[1]", "fast:{"):
        with pytest.raises(argparse.ArgumentTypeError, match="NAME"):
            peers.named_options(wrong)


def test_serving_figures_come_from_arrivals() -> None:
    tokens = [[1.0 + i, 3.0 + i] for i in range(16)]
    found = peer_serving.figures(0.0, tokens)
    assert found["wall_s"] == 18.0
    assert found["ttft_p50_s"] == 8.5
    assert found["ttft_p99_s"] == 16.0
    assert found["output_tokens_per_s"] == pytest.approx(16 * peer_serving.NEW / 18)


def test_options_become_flags() -> None:
    given = {"max_model_len": 1152, "enable_prefix_caching": True, "async_scheduling": False}
    assert peer_serving.flags(given) == [
        "--max-model-len",
        "1152",
        "--enable-prefix-caching",
        "--no-async-scheduling",
    ]


def test_a_start_is_timed_with_its_peak_memory(tmp_path: Path) -> None:
    run = Run(Places(tmp_path), 1)
    code = "import time; block = bytearray(50_000_000); time.sleep(0.05); print(len(block))"
    seconds, peak = peer_startup.time_start([sys.executable, "-c", code], run, str(tmp_path))
    assert seconds > 0.05
    assert peak > 50_000_000
    with pytest.raises(RuntimeError, match="ended with 3"):
        peer_startup.time_start([sys.executable, "-c", "raise SystemExit(3)"], run, str(tmp_path))


def test_a_stopped_worker_ends_with_its_parent() -> None:
    child = "from benchmarks.cpu.workers.protocol import die_with_parent as d; d(); print('up', flush=True); input()"
    parent = (
        "import os, signal, subprocess, sys\n"
        "p = subprocess.Popen([sys.executable, '-c', sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "p.stdout.readline(); os.kill(p.pid, signal.SIGSTOP); print(p.pid, flush=True); os._exit(0)"
    )
    said = subprocess.run([sys.executable, "-c", parent, child], capture_output=True, text=True, check=True).stdout
    state = Path(f"/proc/{int(said)}/stat")
    deadline = time.monotonic() + 30
    while state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline, "the worker outlived its parent"
        time.sleep(0.01)
