"""`penstock bench`: latency and throughput of an engine in this process, or of any server with OpenAI's API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.command import Command, one_of
from penstock.cli.load import ENDPOINTS, Send, engine_sender, server_sender
from penstock.cli.measure import PERCENTILES, RequestRecord, parse_goodput, summarize
from penstock.cli.options import flag, takes, takes_engine_options
from penstock.cli.sweep import Point, Sweep, columns_of, parse_loads, rows_of, run_sweep
from penstock.cli.terminal import loading_bar
from penstock.cli.workload import DATASETS, Job, WorkloadOptions, drive, make_jobs, warm_up
from penstock.config.errors import ConfigError, EngineDeadError
from penstock.config.options import EngineOptions

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Measure latency, throughput or a running server.")
_WORKLOAD, _REPORT = "Workload", "Report"
_SERVER = "Server"
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


_TARGET_FLAGS = (
    flag("base_url", str, "http://127.0.0.1:8000", _SERVER, "The server, with or without /v1.", hidden=False),
    flag("model", str | None, None, _SERVER, "Default: the first one the server lists.", hidden=False),
    flag("api_key", str | None, None, _SERVER, "Sent as a bearer token.", hidden=False),
    flag("endpoint", str, "completions", _SERVER, "Which route.", hidden=False, **one_of(ENDPOINTS)),
    flag("temperature", float, 0.0, _SERVER, "Sent with every request.", hidden=False),
    flag("num_warmup", int, 1, _SERVER, "Requests before the measured ones.", "--num-warmups", hidden=False, min=0),
)


def _workload(given: Any) -> WorkloadOptions:
    chosen = dict(given)
    return WorkloadOptions(seed=chosen.pop("job_seed"), **chosen)


@dataclass(frozen=True, slots=True)
class Target:
    """The server that is measured."""

    base_url: str
    model: str | None
    api_key: str | None
    endpoint: str
    temperature: float
    num_warmup: int

    @asynccontextmanager
    async def sender(self, jobs: Sequence[Job]) -> AsyncIterator[tuple[Send, str]]:
        """What sends it jobs, after a few that warm it up, and the name of the model."""
        async with server_sender(
            self.base_url,
            model=self.model,
            api_key=self.api_key,
            endpoint=self.endpoint,
            temperature=self.temperature,
        ) as (send, name):
            for job in jobs[: self.num_warmup]:
                await send(warm_up(job))
            yield send, name

    def told(self, name: str) -> dict[str, Any]:
        """What a report says of it."""
        return {"base_url": self.base_url, "model": name, "endpoint": self.endpoint}


_takes_workload = takes("workload", (*_DATASET_FLAGS, *_LENGTH_FLAGS), _workload)
takes_lengths = takes("workload", _LENGTH_FLAGS, _workload)
_takes_report = takes("report", _REPORT_FLAGS, dict)
_takes_target = takes("target", _TARGET_FLAGS, lambda given: Target(**given))


@app.command(cls=Command)
@takes_engine_options
@takes_lengths
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
@_takes_target
def serve(
    workload: WorkloadOptions,
    report: dict[str, Any],
    target: Target,
    request_rate: Annotated[
        float | None,
        typer.Option("--request-rate", min=1e-6, help="Open loop: requests a second, Poisson. Default: all at once."),
    ] = None,
    max_concurrency: Annotated[
        int | None, typer.Option("--max-concurrency", min=1, help="Closed loop: requests at a time.")
    ] = None,
) -> None:
    """Latency and throughput of a running server of any make that streams OpenAI's API."""
    _refuse_early(report)
    jobs = make_jobs(workload)

    async def work() -> tuple[list[RequestRecord], float, str]:
        async with target.sender(jobs) as (send, name):
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
    how = {**target.told(name), "request_rate": request_rate}
    _report("serve", {**how, "max_concurrency": max_concurrency, **_shape(workload)}, records, seconds, report)


@app.command(cls=Command)
@_takes_workload
@_takes_report
@_takes_target
def sweep(
    workload: WorkloadOptions,
    report: dict[str, Any],
    target: Target,
    max_concurrency: Annotated[
        str | None,
        typer.Option("--max-concurrency", metavar="LIST", help="Closed loop: so many at a time."),
    ] = None,
    request_rate: Annotated[
        str | None,
        typer.Option("--request-rate", metavar="LIST", help="Open loop: requests a second, Poisson."),
    ] = None,
    find_limit: Annotated[
        bool, typer.Option("--find-limit", help="Then look for the greatest load that meets --goodput.")
    ] = False,
    attainment: Annotated[
        float, typer.Option("--attainment", min=0.01, max=1.0, help="The share of requests that must meet it.")
    ] = 0.9,
) -> None:
    """A running server under one load after the other: a table of throughput and latency. Default: 1, 2, 4 … 32 at a
    time. Every load sends --num-prompts requests of its own.
    """
    if max_concurrency is not None and request_rate is not None:
        raise ConfigError("--max-concurrency and --request-rate are given; a sweep has one of them.")
    objectives = parse_goodput(report["goodput"])
    if find_limit and not objectives:
        raise ConfigError("--find-limit needs objectives; give them with --goodput, for example ttft:2000,tpot:100.")
    flag = "--max-concurrency" if request_rate is None else "--request-rate"
    loads = parse_loads(flag, request_rate or max_concurrency or "1,2,4,8,16,32")
    plan = Sweep(flag, loads, objectives, attainment if find_limit else None)
    _refuse_early(report)
    jobs = make_jobs(_sized(workload, workload.num_prompts * plan.most_points))

    async def work() -> tuple[list[Point], float | None, str]:
        async with target.sender(jobs) as (send, name):

            async def at(load: float, batch: Sequence[Job]) -> tuple[list[RequestRecord], float]:
                how = {"max_concurrency": int(load)} if plan.whole else {"request_rate": load}
                with loading_bar(title=f"{flag} {load:g}", unit="requests") as told:
                    return await drive(batch, send, seed=workload.seed, progress=told, **how)

            return (*await run_sweep(plan, jobs, workload.num_prompts, at), name)

    points, limit, name = asyncio.run(work())
    _report_sweep(plan, points, limit, {**target.told(name), **_shape(workload)}, report)


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
    _write_json({"benchmark": kind, "setup": how, **figures}, report)
    if report["plot_path"] is not None:
        from penstock.cli.plot import plot_latencies

        plot_latencies(records, report["plot_path"], title=f"penstock bench {kind}")
    if not figures["requests"]["completed"]:
        raise EngineDeadError(
            f"no request was completed; the first error: {next(iter(figures['errors']), 'none sent')}"
        )


def _report_sweep(
    plan: Sweep, points: Sequence[Point], limit: float | None, how: dict[str, Any], report: dict[str, Any]
) -> None:
    """As `_report`, of a sweep."""
    from penstock.cli.terminal import print_table

    print_table("bench sweep", columns_of(plan), list(rows_of(plan, points)), numbers=True)
    if plan.attainment is not None:
        met = f"at which {plan.attainment:.0%} of the requests met the objectives"
        if limit is None:
            typer.echo(f"\nNone of these loads is one {met}.")
        else:
            beyond = ", the greatest that was tried" if limit == points[-1].load else ""
            typer.echo(f"\nGreatest load {met}: {plan.flag} {limit:g}{beyond}")
    figures = [{"load": point.load, **point.figures} for point in points]
    told = {"benchmark": "sweep", "setup": {**how, "swept": plan.flag}, "points": figures}
    _write_json({**told, "limit": limit} if plan.attainment is not None else told, report)
    if report["plot_path"] is not None:
        from penstock.cli.plot import plot_sweep

        plot_sweep([(point.load, point.figures) for point in points], report["plot_path"], loads=plan.flag)
    if not any(point.figures["requests"]["completed"] for point in points):
        first = next((message for point in points for message in point.figures["errors"]), "none sent")
        raise EngineDeadError(f"no request was completed; the first error: {first}")


def _write_json(told: dict[str, Any], report: dict[str, Any]) -> None:
    path = report["json_path"]
    if path is not None:
        try:
            path.write_text(json.dumps(told, indent=2) + "\n")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror or error}.") from None


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
