"""`penstock serve` in a real process, and `penstock bench` against it and in this one."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from benchmarks.server_child import ServerChild, maps_torch, serve
from penstock.cli.main import app
from tests.cli.conftest import Penstock

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[ServerChild]:
    with serve(("--api-key", "one", "--api-key", "two", "--served-model-name", "bench-me", "--threads", "1")) as child:
        yield child


def bench(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", *arguments], catch_exceptions=False)


def test_the_flags_reach_the_server_and_its_http_process_has_no_torch(server: ServerChild) -> None:
    for key in ("one", "two"):
        answer = httpx.get(f"{server.url}/v1/models", headers={"Authorization": f"Bearer {key}"}, trust_env=False)
        assert answer.json()["data"][0]["id"] == "bench-me"
    assert httpx.get(f"{server.url}/v1/models", trust_env=False).status_code == 401
    assert not maps_torch(server.http.pid)
    assert maps_torch(server.engine().pid)


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_bench_serve_measures_a_server(server: ServerChild, tmp_path: Path, endpoint: str) -> None:
    report, plot = tmp_path / "figures.json", tmp_path / "latency.svg"
    result = bench(
        "serve", "--base-url", f"{server.url}/v1", "--api-key", "one", "--endpoint", endpoint, "--num-prompts", "6",
        "--input-len", "12", "--output-len", "5", "--max-concurrency", "3", "--request-rate", "200",
        "--goodput", "e2el:600000", "--json", str(report), "--plot", str(plot),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "TTFT" in result.stdout
    figures = json.loads(report.read_text(encoding="utf-8"))
    assert figures["setup"]["model"] == "bench-me"
    assert figures["requests"] == {"sent": 6, "completed": 6, "failed": 0}
    assert figures["output_tokens"] == 30
    assert figures["prompt_tokens"] >= 6 * 12
    assert figures["ttft_ms"]["p50"] <= figures["e2el_ms"]["p50"]
    assert figures["goodput"]["slo_attainment"] == 1.0
    assert plot.read_text(encoding="utf-8").lstrip().startswith("<?xml")


def test_bench_sweep_measures_a_server_under_several_loads(server: ServerChild, tmp_path: Path) -> None:
    path, plot = tmp_path / "figures.json", tmp_path / "sweep.svg"
    result = bench(
        *("sweep", "--base-url", server.url, "--api-key", "one", "--num-prompts", "3", "--workload-seed", "7"),
        *(
            "--input-len",
            "8",
            "--output-len",
            "4",
            "--max-concurrency",
            "2,1",
            "--goodput",
            "e2el:600000",
            "--find-limit",
        ),
        *("--json", str(path), "--plot", str(plot)),
    )
    assert result.exit_code == 0, result.output
    figures = json.loads(path.read_text())
    assert [point["load"] for point in figures["points"]] == [1, 2] and figures["limit"] == 2
    assert all(point["requests"]["completed"] == 3 and not point["cached_tokens"] for point in figures["points"])
    assert "tokens/s" in result.output and "--max-concurrency 2" in result.output
    assert plot.read_text().lstrip().startswith("<?xml")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--max-concurrency", "1", "--request-rate", "1"), "a sweep has one of them"),
        (("--find-limit",), "--find-limit needs objectives"),
    ],
)
def test_bench_sweep_refuses_what_contradicts_itself(arguments: tuple[str, ...], told: str) -> None:
    result = bench("sweep", *arguments)
    assert result.exit_code == 1 and told in result.output


def test_bench_serve_counts_refusals(server: ServerChild, tmp_path: Path) -> None:
    report = tmp_path / "figures.json"
    result = bench(
        "serve", "--base-url", server.url, "--model", "unknown", "--api-key", "one",
        "--num-prompts", "3", "--json", str(report),
    )  # fmt: skip
    assert result.exit_code == 1
    assert "no request was completed" in result.stderr
    figures = json.loads(report.read_text(encoding="utf-8"))
    assert figures["requests"]["failed"] == 3
    assert next(iter(figures["errors"])).startswith("HTTP 404")


def test_bench_serve_without_a_server_is_one_clear_line() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        result = bench("serve", "--base-url", f"http://127.0.0.1:{closed.getsockname()[1]}")
    assert result.exit_code == 1
    assert "is a server running there?" in result.stderr


def test_bench_serve_without_httpx_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.cli.load.find_spec", lambda name: None)
    result = bench("serve", "--base-url", "http://127.0.0.1:1", "--num-prompts", "1")
    assert result.exit_code == 1
    assert "pip install 'penstock-llm[bench]'" in result.stderr


def test_bench_runs_in_process(tmp_path: Path) -> None:
    report = tmp_path / "figures.json"
    few = ("--input-len", "8", "--output-len", "4", "--threads", "1", "--json", str(report))
    assert bench("latency", "--batch-size", "2", "--num-iters", "2", "--num-iters-warmup", "1", *few).exit_code == 0
    figures = json.loads(report.read_text(encoding="utf-8"))
    assert figures["requests"]["completed"] == 4
    assert figures["output_tokens"] == 16
    assert figures["itl_ms"]["count"] == 12
    shared = ("--dataset", "prefix-repetition", "--num-prefixes", "1", "--prefix-len", "32", "--num-prompts", "4")
    assert bench("throughput", "--max-concurrency", "1", *shared, *few).exit_code == 0
    figures = json.loads(report.read_text(encoding="utf-8"))
    assert figures["requests"]["completed"] == 4
    assert figures["cached_tokens"] >= 3 * 32


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--plot", "x.pdf"], "--plot"),
        (["--goodput", "speed:1"], "--goodput"),
        (["--dataset", "azure"], "--dataset-path"),
        (["--endpoint", "embeddings"], "--endpoint"),
    ],
)
def test_unusable_flags_are_refused_before_the_work(arguments: list[str], named: str) -> None:
    result = bench("serve", *arguments)
    assert result.exit_code == (2 if named == "--endpoint" else 1)
    assert named in result.stderr


def test_serve_refuses_a_public_address_without_a_key_and_a_taken_port(penstock: Penstock) -> None:
    exposed = penstock("serve", "--host", "0.0.0.0", "--port", "0")
    assert exposed.returncode == 1
    assert "--api-key" in exposed.stderr or "PENSTOCK_API_KEY" in exposed.stderr
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        refused = penstock("serve", "--port", port)
    assert refused.returncode == 1
    assert port in refused.stderr
