"""The arithmetic of load tests, against values worked out by hand."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.measure import RequestRecord, meets, parse_goodput, percentile, summarize
from penstock.cli.workload import Job, WorkloadOptions, drive, make_jobs, warm_up
from penstock.config.errors import ConfigError


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.sampled_from([0, 1, 50, 90, 99, 100]))
def test_percentile_is_numpys_linear_one(values: list[float], percent: int) -> None:
    assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)), abs=1e-6)


def test_percentile_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        percentile([], 50)


def record(*times: float, end: float, tokens: int | None = None, error: str | None = None) -> RequestRecord:
    return RequestRecord(10.0, end, times, 5, len(times) if tokens is None else tokens, 0, error)


def test_latencies_of_one_request() -> None:
    found = record(10.5, 10.7, 11.3, end=11.5, tokens=5)
    assert found.ttft == pytest.approx(0.5)
    assert found.e2el == pytest.approx(1.5)
    assert found.tpot == pytest.approx((1.5 - 0.5) / 4)
    assert found.itl == pytest.approx((0.2, 0.6))


def test_one_token_has_no_tpot_and_no_itl_and_counts_as_zero_for_goodput() -> None:
    found = record(10.5, end=10.6)
    assert found.tpot is None
    assert found.itl == ()
    assert meets(found, {"tpot": 1.0})
    assert summarize([found], 1.0)["tpot_ms"] is None


def test_failed_requests_are_counted_but_not_timed() -> None:
    good, slow = record(10.1, 10.2, end=10.2), record(12.0, 12.1, end=12.1)
    failed = record(end=10.1, tokens=0, error="HTTP 503")
    figures = summarize([good, slow, failed], 2.0, {"ttft": 1000.0, "tpot": 200.0})
    assert figures["requests"] == {"sent": 3, "completed": 2, "failed": 1}
    assert figures["errors"] == {"HTTP 503": 1}
    assert figures["output_tokens_per_s"] == pytest.approx(2.0)
    assert figures["total_tokens_per_s"] == pytest.approx((4 + 10) / 2)
    assert figures["ttft_ms"]["count"] == 2
    assert figures["ttft_ms"]["p50"] == pytest.approx(1050)
    assert figures["itl_ms"]["mean"] == pytest.approx(100)
    assert figures["goodput"]["requests_per_s"] == pytest.approx(0.5)
    assert figures["goodput"]["slo_attainment"] == pytest.approx(1 / 3)


def test_goodput_is_parsed_strictly() -> None:
    assert parse_goodput("ttft:2000, tpot:100.5") == {"ttft": 2000.0, "tpot": 100.5}
    assert parse_goodput(None) == {}
    for wrong in ("ttft", "ttft:0", "itl:5", "ttft:nan", "ttft:x"):
        with pytest.raises(ConfigError, match="goodput"):
            parse_goodput(wrong)


def test_random_jobs_are_reproducible_and_have_the_asked_lengths() -> None:
    options = WorkloadOptions(num_prompts=50, input_len=100, output_len=20, range_ratio=0.5, vocab_size=64)
    jobs = make_jobs(options)
    assert jobs == make_jobs(options)
    assert len({job.prompt for job in jobs}) == 50
    assert all(50 <= len(job.prompt) <= 150 and 10 <= job.max_tokens <= 30 for job in jobs)
    assert all(0 <= token < 64 for job in jobs for token in job.prompt if isinstance(token, int))
    assert {len(job.prompt) for job in make_jobs(WorkloadOptions(num_prompts=5, input_len=7))} == {7}


def test_prefixes_repeat() -> None:
    jobs = make_jobs(WorkloadOptions("prefix-repetition", num_prompts=40, input_len=8, prefix_len=32, num_prefixes=3))
    assert len({job.prompt[:32] for job in jobs}) == 3
    assert len({job.prompt for job in jobs}) == 40


def test_a_warm_up_shares_no_prefix() -> None:
    job = make_jobs(WorkloadOptions(num_prompts=1))[0]
    assert warm_up(job).prompt[:4] != job.prompt[:4]
    assert warm_up(job).max_tokens == 2


def test_files_give_lengths_and_prompts(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n1,300,44\n2,20,5\n3,9,0\n", encoding="utf-8")
    jobs = make_jobs(WorkloadOptions("azure", trace, input_len=128, output_len=64))
    assert [(len(job.prompt), job.max_tokens) for job in jobs] == [(128, 44), (20, 5)]
    chats = tmp_path / "chats.jsonl"
    chats.write_text(
        '{"conversations": [{"from": "human", "value": "one"}]}\n{"prompt": "two"}\nbroken\n{"turns": ["three"]}\n',
        encoding="utf-8",
    )
    jobs = make_jobs(WorkloadOptions("sharegpt", chats))
    assert [job.prompt for job in jobs] == ["one", "two", "three"]
    assert not any(job.ignore_eos for job in jobs)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (WorkloadOptions("mystery"), "dataset"),
        (WorkloadOptions("azure"), "dataset-path"),
        (WorkloadOptions("azure", Path("nowhere.csv")), "nowhere.csv"),
        (WorkloadOptions("azure", Path(__file__)), "ContextTokens"),
        (WorkloadOptions("sharegpt", Path(__file__)), "no usable request"),
        (WorkloadOptions(num_prompts=0), "num-prompts"),
        (WorkloadOptions(range_ratio=1.0), "range-ratio"),
        (WorkloadOptions(vocab_size=2), "vocab-size"),
    ],
)
def test_unusable_workloads_are_refused(options: WorkloadOptions, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make_jobs(options)


async def test_a_closed_loop_never_exceeds_its_concurrency_and_an_open_one_keeps_its_pace() -> None:
    active = peak = 0
    starts: list[float] = []

    async def send(job: Job) -> RequestRecord:
        nonlocal active, peak
        active += 1
        peak = max(peak, active)
        started = time.perf_counter()
        starts.append(started)
        await asyncio.sleep(0.01)
        active -= 1
        return RequestRecord(started, time.perf_counter(), output_tokens=1)

    jobs = [Job("x", 1)] * 20
    records, seconds = await drive(jobs, send, max_concurrency=4)
    assert len(records) == 20
    assert peak == 4
    assert seconds >= 5 * 0.01
    starts.clear()
    began = time.perf_counter()
    await drive(jobs * 4, send, request_rate=400.0, seed=1)
    assert max(starts) - began >= 0.5 * 79 / 400  # a busy machine may be late, never early


def test_sharegpt_s_own_file_is_one_array(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "What is a penstock?"}, {"from": "gpt", "value": "A gated channel."}]
    file = tmp_path / "ShareGPT.json"
    file.write_text(json.dumps([{"id": "a", "conversations": turns}, {"id": "b", "conversations": []}], indent=1))
    assert [job.prompt for job in make_jobs(WorkloadOptions("sharegpt", file))] == ["What is a penstock?"]
    file.write_text('[{"conversations": ')
    with pytest.raises(ConfigError, match="begins as a JSON array, but is none"):
        make_jobs(WorkloadOptions("sharegpt", file))


def test_mooncake_s_requests_share_the_blocks_that_it_names(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 1100, "output_length": 9, "hash_ids": [1, 2, 3]},
        {"timestamp": 1, "input_length": 1030, "output_length": 90, "hash_ids": [1, 2, 4]},
        {"timestamp": 2, "input_length": 0, "output_length": 1, "hash_ids": []},
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = make_jobs(WorkloadOptions("mooncake", file, input_len=2000, output_len=50))
    assert (len(first.prompt), len(second.prompt)) == (1100, 1030)
    assert (first.max_tokens, second.max_tokens) == (9, 50)
    assert first.prompt[:1024] == second.prompt[:1024]
    assert first.prompt[1024:1030] != second.prompt[1024:]


async def test_progress_is_told_as_requests_end() -> None:
    told: list[tuple[int, int]] = []

    async def send(job: Job) -> RequestRecord:
        return RequestRecord(0.0, 1.0)

    await drive(make_jobs(WorkloadOptions(num_prompts=3)), send, progress=lambda *counts: told.append(counts))
    assert told == [(1, 3), (2, 3), (3, 3)]
