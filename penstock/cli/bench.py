"""`penstock bench`: latency and throughput of an engine in this process, or of any server with OpenAI's API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.command import Command, one_of
from penstock.cli.load import ENDPOINTS, Send, engine_sender, server_sender
from penstock.cli.measure import PERCENTILES, RequestRecord, parse_goodput, summarize
from penstock.cli.options import flag, takes, takes_engine_options
from penstock.cli.terminal import loading_bar
from penstock.cli.workload import DATASETS, WorkloadOptions, drive, make_jobs, warm_up
from penstock.config.errors import ConfigError, EngineDeadError
from penstock.config.options import EngineOptions

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Measure latency, throughput or a running server.")
_WORKLOAD, _REPORT = "Workload", "Report"
_DATASET_FLAGS = (
    flag("dataset", str, "random", _WORKLOAD, "What is sent: drawn tokens, or what a file holds.", **one_of(DATASETS)),
    flag(
        "path",
        Path | None,
        None,
        _WORKLOAD,
        "The file: azure's CSV, mooncake's JSON lines, sharegpt's JSON or JSON lines.",
        "--dataset-path",
    ),
    flag("num_prompts", int, 64, _WORKLOAD, "Requests to send."),
    flag("range_ratio", float, 0.0, _WORKLOAD, "Random lengths vary by this share around the given ones."),
    flag("prefix_len", int, 256, _WORKLOAD, "Tokens of a shared prefix (prefix-repetition)."),
    flag("num_prefixes", int, 4, _WORKLOAD, "Different shared prefixes (prefix-repetition)."),
)
_LENGTH_FLAGS = (
    flag("input_len", int, 128, _WORKLOAD, "Tokens of a prompt, or the most where a file gives them."),
    flag("output_len", int, 64, _WORKLOAD, "Tokens of an answer, or the most where a file gives them."),
    flag("vocab_size", int, 1000, _WORKLOAD, "Token ids are drawn below this."),
    flag("job_seed", int, 0, _WORKLOAD, "Seed of prompts and arrival times.", "--workload-seed"),
)
_REPORT_FLAGS = (
    flag("goodput", str | None, None, _REPORT, "Objectives in ms, for example ttft:2000,tpot:100,e2el:10000."),
    flag("json_path", Path | None, None, _REPORT, "Write all figures to this file.", "--json"),
    flag("plot_path", Path | None, None, _REPORT, "Draw the latencies into this .png or .svg file.", "--plot"),
)


def _workload(given: Any) -> WorkloadOptions:
    chosen = dict(given)
    return WorkloadOptions(seed=chosen.pop("job_seed"), **chosen)


_takes_workload = takes("workload", (*_DATASET_FLAGS, *_LENGTH_FLAGS), _workload)
_takes_lengths = takes("workload", _LENGTH_FLAGS, _workload)
_takes_report = takes("report", _REPORT_FLAGS, dict)


@app.command(cls=Command)
@takes_engine_options
@_takes_lengths
@_takes_report
def latency(
    engine: EngineOptions,
    workload: WorkloadOptions,
    report: dict[str, Any],
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Requests at a time.")] = 1,
    num_iters: Annotated[int, typer.Option("--num-iters", min=1, help="Batches that are measured.")] = 10,
    num_warmup: Annotated[int, typer.Option("--num-iters-warmup", min=0, help="Batches before those.")] = 2,
) -> None:
    """Latency of batches of equal requests, one batch after the other, in this process."""
    _refuse_early(report)
    jobs = make_jobs(_sized(workload, batch_size * (num_iters + num_warmup)))
    batches = [jobs[start : start + batch_size] for start in range(0, len(jobs), batch_size)]

    async def work(send: Send) -> tuple[list[RequestRecord], float]:
        records: list[RequestRecord] = []
        seconds = 0.0
        with loading_bar(title="Batches", unit="batches") as told:
            for index, batch in enumerate(batches):
                found, duration = await drive(batch, send)
                told(index + 1, len(batches))
                if index >= num_warmup:
                    records += found
                    seconds += duration
        return records, seconds

    records, seconds = _in_process(engine, work)
    _report("latency", {"batch_size": batch_size, **_shape(workload)}, records, seconds, report)


@app.command(cls=Command)
@takes_engine_options
@_takes_workload
@_takes_report
def throughput(
    engine: EngineOptions,
    workload: WorkloadOptions,
    report: dict[str, Any],
    max_concurrency: Annotated[int | None, typer.Option("--max-concurrency", min=1, help="Requests at a time.")] = None,
) -> None:
    """Throughput with all requests there from the start, in this process."""
    _refuse_early(report)
    jobs = make_jobs(workload)

    async def work(send: Send) -> tuple[list[RequestRecord], float]:
        await send(warm_up(jobs[0]))  # first-use costs belong to no request
        with loading_bar(title="Requests", unit="requests") as told:
            return await drive(jobs, send, max_concurrency=max_concurrency, progress=told)

    records, seconds = _in_process(engine, work)
    _report("throughput", {"max_concurrency": max_concurrency, **_shape(workload)}, records, seconds, report)


@app.command(cls=Command)
@_takes_workload
@_takes_report
def serve(
    workload: WorkloadOptions,
    report: dict[str, Any],
    base_url: Annotated[
        str, typer.Option("--base-url", help="The server, with or without /v1.")
    ] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option("--model", help="Default: the first one the server lists.")] = None,
    api_key: Annotated[str | None, typer.Option("--api-key", help="Sent as a bearer token.")] = None,
    endpoint: Annotated[str, typer.Option("--endpoint", help="Which route.", **one_of(ENDPOINTS))] = "completions",
    temperature: Annotated[float, typer.Option("--temperature", help="Sent with every request.")] = 0.0,
    request_rate: Annotated[
        float | None,
        typer.Option("--request-rate", min=1e-6, help="Open loop: requests a second, Poisson. Default: all at once."),
    ] = None,
    max_concurrency: Annotated[
        int | None, typer.Option("--max-concurrency", min=1, help="Closed loop: requests at a time.")
    ] = None,
    num_warmup: Annotated[int, typer.Option("--num-warmups", min=0, help="Requests before the measured ones.")] = 1,
) -> None:
    """Latency and throughput of a running server of any make that streams OpenAI's API."""
    _refuse_early(report)
    jobs = make_jobs(workload)

    async def work() -> tuple[list[RequestRecord], float, str]:
        async with server_sender(
            base_url, model=model, api_key=api_key, endpoint=endpoint, temperature=temperature
        ) as (send, name):
            for job in jobs[:num_warmup]:
                await send(warm_up(job))
            with loading_bar(title="Requests", unit="requests") as told:
                found = await drive(
                    jobs,
                    send,
                    request_rate=request_rate,
                    max_concurrency=max_concurrency,
                    seed=workload.seed,
                    progress=told,
                )
            return (*found, name)

    records, seconds, name = asyncio.run(work())
    how = {"base_url": base_url, "model": name, "endpoint": endpoint, "request_rate": request_rate}
    _report("serve", {**how, "max_concurrency": max_concurrency, **_shape(workload)}, records, seconds, report)


def _sized(workload: WorkloadOptions, count: int) -> WorkloadOptions:
    return replace(workload, num_prompts=count)


def _shape(workload: WorkloadOptions) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(workload).items()}


def _in_process(engine: EngineOptions, work: Any) -> tuple[list[RequestRecord], float]:
    from penstock.cli.start import start
    from penstock.cli.terminal import configure_logging

    configure_logging(quiet=True)

    async def run() -> tuple[list[RequestRecord], float]:
        llm = await start(engine)
        try:
            found: tuple[list[RequestRecord], float] = await work(await engine_sender(llm))
            return found
        finally:
            await llm.close()

    return asyncio.run(run())


def _refuse_early(report: dict[str, Any]) -> None:
    """Finds what is wrong with the report's flags before the work, not after it.

    Raises:
        ConfigError: unknown objectives, or a plot of an unknown kind or without matplotlib.
    """
    parse_goodput(report["goodput"])
    if report["plot_path"] is not None:
        from penstock.cli.plot import check_plot

        check_plot(report["plot_path"])


def _report(
    kind: str, how: dict[str, Any], records: Sequence[RequestRecord], seconds: float, report: dict[str, Any]
) -> None:
    """Prints the figures and writes what was asked for; fails if no request was completed."""
    figures = summarize(records, seconds, parse_goodput(report["goodput"]))
    _print(kind, figures)
    if report["json_path"] is not None:
        try:
            report["json_path"].write_text(json.dumps({"benchmark": kind, "setup": how, **figures}, indent=2) + "\n")
        except OSError as error:
            raise ConfigError(f"{report['json_path']} cannot be written: {error.strerror or error}.") from None
    if report["plot_path"] is not None:
        from penstock.cli.plot import plot_latencies

        plot_latencies(records, report["plot_path"], title=f"penstock bench {kind}")
    if not figures["requests"]["completed"]:
        raise EngineDeadError(
            f"no request was completed; the first error: {next(iter(figures['errors']), 'none sent')}"
        )


def _print(kind: str, figures: dict[str, Any]) -> None:
    from penstock.cli.terminal import print_table

    requests, goodput = figures["requests"], figures.get("goodput")
    rows = [
        ("requests", f"{requests['completed']} completed, {requests['failed']} failed, {requests['sent']} sent"),
        ("duration", f"{figures['duration_s']:.2f} s"),
        (
            "tokens",
            f"{figures['prompt_tokens']} prompt ({figures['cached_tokens']} cached), {figures['output_tokens']} output",
        ),
        ("requests/s", f"{figures['requests_per_s']:.2f}"),
        ("output tokens/s", f"{figures['output_tokens_per_s']:.1f}"),
        ("total tokens/s", f"{figures['total_tokens_per_s']:.1f}"),
    ]
    if figures["tokens_per_chunk"]:
        rows.append(("tokens/chunk", f"{figures['tokens_per_chunk']:.2f}"))
    if goodput:
        share = f"{goodput['slo_attainment']:.1%} of those sent"
        rows.append(("goodput", f"{goodput['requests_per_s']:.2f} requests/s, {share}"))
    rows += [("error", f"{count} × {message}") for message, count in list(figures["errors"].items())[:5]]
    print_table(f"bench {kind}", ("", ""), rows)
    typer.echo()
    columns = ("mean", *(f"p{p}" for p in PERCENTILES), "max", "count")
    latencies = [(name, figures[f"{name.lower()}_ms"]) for name in ("TTFT", "TPOT", "ITL", "E2EL")]
    print_table(
        "Latency in ms",
        ("", *columns),
        [(n, *(f"{d[c]:.0f}" if c == "count" else f"{d[c]:.2f}" for c in columns)) for n, d in latencies if d],
        numbers=True,
    )
