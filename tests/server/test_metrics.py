"""Figures and their names."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import httpx
import pytest
from prometheus_client import Counter
from prometheus_client.parser import text_string_to_metric_families

from penstock.config.engine_stats import EngineStats
from penstock.engine.text_pipeline import TextPipeline
from penstock.server.metrics import ALIASES, EngineFigures, Metrics, ModelMetrics, throughput_line
from tests.server.support import Running, Serving, kill, running, serving_a_process, until

Labels = tuple[tuple[str, str], ...]


def scrape(server: Serving) -> dict[tuple[str, Labels], float]:
    text = httpx.get(f"{server.url}/metrics").text
    families = list(text_string_to_metric_families(text))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def value(found: dict[tuple[str, Labels], float], name: str, **labels: str) -> float:
    if not name.startswith(("http_", "penstock_http")):
        labels["model_name"] = "scripted"
    return found.get((name, tuple(sorted(labels.items()))), 0.0)


def test_requests_are_counted(server: Running) -> None:
    before = scrape(server)
    for stream in (False, True):
        body = {"prompt": ["Hello", "Good morning"], "n": 2, "stream": stream, "max_tokens": 4}
        httpx.post(f"{server.url}/v1/completions", json=body)
    httpx.post(f"{server.url}/v1/completions", json={"prompt": 5})
    httpx.get(f"{server.url}/nowhere/at/all")
    after = scrape(server)

    def grown(name: str, **labels: str) -> float:
        return value(after, name, **labels) - value(before, name, **labels)

    assert grown("penstock_requests_finished_total", finished_reason="length") == 8
    assert grown("penstock_time_to_first_token_seconds_count") == 8
    assert grown("penstock_inter_token_latency_seconds_count") == 24
    assert grown("penstock_time_per_output_token_seconds_count") == 8
    assert grown("penstock_request_seconds_count") == 2
    assert grown("penstock_request_generation_tokens_sum") == 32
    for phase in ("queue", "prefill", "decode", "inference"):
        assert grown(f"vllm:request_{phase}_time_seconds_count") == 4
    assert grown("penstock_request_params_n_sum") == 8
    assert grown("penstock_request_params_max_tokens_sum") == 16
    route = {"route": "/v1/completions", "method": "POST"}
    assert grown("penstock_http_requests_total", **route, status="200") == 2
    assert grown("penstock_http_requests_total", **route, status="400") == 1
    assert grown("penstock_http_requests_total", route="unmatched", method="GET", status="404") == 1
    assert grown("penstock_http_request_seconds_count", route="/v1/completions") == 3


def test_every_alias_has_the_value_of_its_source(server: Running) -> None:
    httpx.post(f"{server.url}/v1/completions", json={"prompt": "Hello"})
    found = scrape(server)
    for ours, aliases in ALIASES.items():
        samples = {
            (name.removeprefix(ours), labels): number
            for (name, labels), number in found.items()
            if name == ours or (name.startswith(ours + "_") and name.removeprefix(ours) in SUFFIXES)
        }
        assert samples or ours in EMPTY, ours
        for alias in aliases:
            for (suffix, labels), number in samples.items():
                if not ours.startswith("penstock_http"):  # this very scrape counts there
                    assert found[alias + suffix, labels] == number, alias


EMPTY = ("penstock_lora_requests_info", "penstock_spec_decode_num_accepted_tokens_per_pos")
"""Nobody has an adapter here, nor drafts."""
SUFFIXES = ("", "_total", "_sum", "_count", "_bucket")


@pytest.mark.parametrize(
    "name",
    [
        "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
        "vllm:gpu_cache_usage_perc", "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total",
        "vllm:num_preemptions_total", "vllm:prompt_tokens_total", "vllm:generation_tokens_total",
        "vllm:e2e_request_latency_seconds_count", "vllm:time_to_first_token_seconds_sum",
        "vllm:inter_token_latency_seconds_count", "vllm:time_per_output_token_seconds_count",
        "vllm:request_prompt_tokens_count", "vllm:request_generation_tokens_count",
        "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
    ],
)  # fmt: skip
def test_names_dashboards_read(server: Running, name: str) -> None:
    assert (name, (("model_name", "scripted"),)) in scrape(server)


def test_why_there_are_drafts_or_none_is_told() -> None:
    stats = EngineStats(
        draft_decisions=(("load", 7), ("verified", 5)),
        accepted_now=1.5,
        accepted_usually=2.5,
        accepted_by_position=((0, 5), (1, 3)),
    )
    families = {
        family.name: family
        for family in ModelMetrics("m", Counter("ended", "", ["name", "reason"], registry=None)).families(
            EngineFigures(stats)
        )
    }
    decisions = families["penstock_spec_decode_decisions"].samples
    assert {sample.labels["reason"]: sample.value for sample in decisions} == {"load": 7, "verified": 5}
    places = families["penstock_spec_decode_num_accepted_tokens_per_pos"].samples
    assert {sample.labels["position"]: sample.value for sample in places} == {"0": 5, "1": 3}
    assert families["penstock_spec_decode_accepted_now"].samples[0].value == 1.5
    assert families["penstock_spec_decode_accepted_usually"].samples[0].value == 2.5


def test_engine_figures(text: TextPipeline) -> None:
    prompts = [[5] * 81, [6] * 65, [7] * 65]  # 6 + 5 + 5 blocks, with room for what is generated meanwhile
    with running(text, num_blocks=65) as server:
        server.runner.delay = 0.5
        ask = {"prompt": prompts, "stream": True, "max_tokens": 500, "ignore_eos": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=ask):
            until(lambda: server.stats().running == 3)
            found = scrape(server)
        assert value(found, "penstock_requests_running") == 3
        assert value(found, "vllm:kv_cache_usage_perc") == 0.25
        assert value(found, "vllm:prefix_cache_queries_total") == 80 + 64 + 64
        assert value(found, "penstock_prefix_cache_misses_total", reason="first_seen") == 3
        assert value(found, "vllm:cache_config_info", block_size="16", num_gpu_blocks="65") == 1
        server.until_idle()
        assert value(scrape(server), "vllm:kv_cache_usage_perc") == 0


def test_metrics_while_the_engine_is_away(text: TextPipeline, tmp_path: Path) -> None:
    with serving_a_process(text, tmp_path, model="slow") as (server, client):
        ask = {"prompt": "Hello", "stream": True, "max_tokens": 2000, "ignore_eos": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=ask) as answer:
            until(lambda: value(scrape(server), "penstock_requests_running") == 1)
            kill(client)
            found = scrape(server)
            assert value(found, "penstock_requests_running") == value(found, "vllm:kv_cache_usage_perc") == 0
            assert value(found, "penstock_engine_restarts_total") == 0
            server.wait(client.close())
            assert "engine was closed" in list(answer.iter_lines())[-2]
        until(lambda: value(scrape(server), "penstock_requests_finished_total", finished_reason="error") == 1)


def test_a_stream_goes_on_when_its_engine_has_died(text: TextPipeline, tmp_path: Path) -> None:
    """Its reader sees what it would have seen anyway."""
    with serving_a_process(text, tmp_path, restart=0.01) as (server, client):
        ask = {"prompt": "Hello", "stream": True, "max_tokens": 600, "ignore_eos": True, "seed": 1, "temperature": 1}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=ask) as answer:
            truth = [pieces(line) for line in answer.iter_lines()]
        (tmp_path / "hold").touch()
        with httpx.stream("POST", f"{server.url}/v1/completions", json=ask) as answer:
            again = []
            for line in answer.iter_lines():
                again.append(pieces(line))
                if len(again) == 100:
                    os.kill(client.pid, signal.SIGKILL)
                    (tmp_path / "hold").unlink()
        assert "".join(again) == "".join(truth)
        found = scrape(server)
        assert value(found, "penstock_engine_restarts_total") == 1
        assert value(found, "penstock_requests_resumed_total") == 1
        assert value(found, "penstock_requests_finished_total", finished_reason="length") == 2


def pieces(line: str) -> str:
    """The text that a line of a stream brings."""
    return json.loads(line[6:])["choices"][0]["text"] if line.startswith("data: {") else ""


def test_metrics_of_an_engine_that_ended(text: TextPipeline) -> None:
    with running(text) as server:
        server.runner.delay = 0.05
        ask = {"prompt": "Hello", "stream": True, "max_tokens": 2000, "ignore_eos": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=ask) as answer:
            until(lambda: value(scrape(server), "penstock_requests_running") == 1)
            server.wait(server.client.close())
            assert "engine was closed" in list(answer.iter_lines())[-2]
        assert value(scrape(server), "penstock_requests_running") == 0


def test_clients_cannot_add_series(server: Running) -> None:
    for number in range(20):
        httpx.get(f"{server.url}/v1/models/x{number}")
        httpx.request(f"METHOD{number}", f"{server.url}/x{number}")
    routes = {dict(labels)["route"] for (name, labels) in scrape(server) if name == "penstock_http_requests_total"}
    methods = {dict(labels)["method"] for (name, labels) in scrape(server) if name == "penstock_http_requests_total"}
    assert not any("x1" in route for route in routes)
    assert methods <= {"GET", "POST", "DELETE", "OPTIONS", "other"}


def test_two_servers_share_nothing() -> None:
    one, other = Metrics(), Metrics()
    one.model("one").finished("stop")
    other.model("other")
    assert b"finished_reason" in one.render({})
    assert b"finished_reason" not in other.render({})


def test_two_models_of_a_server_have_one_family_of_each_figure() -> None:
    metrics = Metrics()
    for name in ("one", "two"):
        metrics.model(name).finished("stop")
        metrics.model(name).first_token.observe(0.5)
    text = metrics.render({"two": EngineFigures(EngineStats(running=3))}).decode()
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    running = next(family for family in families if family.name == "penstock_requests_running")
    assert {sample.labels["model_name"]: sample.value for sample in running.samples} == {"one": 0, "two": 3}


def test_the_throughput_line() -> None:
    now = EngineStats(
        running=3, waiting=2, blocks_used=32, blocks_total=64, prefix_queries=200, prefix_hits=150,
        prompt_tokens=1000, generated_tokens=500,
    )  # fmt: skip
    line = throughput_line(EngineStats(prefix_queries=100, prefix_hits=100), now, 10.0)
    assert line == ("running 3, waiting 2, KV 50.0%, prefix hits 50.0%, prompt 100.0 tok/s, generation 50.0 tok/s")
