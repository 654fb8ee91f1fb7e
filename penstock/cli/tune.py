"""`penstock tune`: measures on this machine which settings of speed suit a model and a load, and writes them down.

Only settings that change no answer are tried: threads, and how many tokens a step may have.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from penstock.cli.bench import takes_lengths
from penstock.cli.command import Command
from penstock.cli.options import takes_engine_options
from penstock.cli.workload import Job, WorkloadOptions, drive, make_jobs, warm_up
from penstock.config.errors import ConfigError, EngineDeadError
from penstock.config.options import EngineOptions

if TYPE_CHECKING:
    from penstock.engine.api import EngineInfo

app = typer.Typer(add_completion=False)
WORTH: Final = 1.03
"""A setting is taken if it is better by more than this in the median, and in every pair."""
_STEP_TOKENS: Final = (128, 256, 512, 1024, 2048)

Settings = Mapping[str, int]
Measure = Callable[[Settings], Awaitable[float]]
"""What an engine with these settings does: more is better."""


@dataclass(slots=True)
class Tuning:
    """Looks for settings, one after the other; what is best so far is measured anew beside each candidate.

    Attributes:
        best: settings so far.
        candidates: other values of each, in the order they are tried.
        repeats: pairs of measurements a candidate; after one that is lost no more are made.
        deadline: on the monotonic clock; no candidate is begun after it.
        found: candidates that were tried: (name, value, median ratio to the best then, whether it was taken).
    """

    best: dict[str, int]
    candidates: Mapping[str, Sequence[int]]
    repeats: int = 3
    deadline: float = float("inf")
    found: list[tuple[str, int, float, bool]] = field(default_factory=list)

    async def run(self, measure: Measure, told: Callable[[str], None] = lambda line: None) -> None:
        """Tries all candidates; raises what `measure` does."""
        for name, values in self.candidates.items():
            for value in values:
                if value == self.best[name] or time.monotonic() > self.deadline:
                    continue
                other = {**self.best, name: value}
                ratios = list[float]()
                while len(ratios) < self.repeats and (not ratios or ratios[-1] > 1):
                    pair = (self.best, other) if len(ratios) % 2 == 0 else (other, self.best)
                    first, second = await measure(pair[0]), await measure(pair[1])
                    ratios.append(second / first if pair[1] is other else first / second)
                taken = min(ratios) > 1 and median(ratios) > WORTH
                self.found.append((name, value, median(ratios), taken))
                told(f"{name} {value}: {median(ratios):.2f} x {self.best[name]}{', taken' if taken else ''}")
                if taken:
                    self.best = other


@app.command(cls=Command)
@takes_engine_options
@takes_lengths
def tune(
    engine: EngineOptions,
    workload: WorkloadOptions,
    emit_config: Annotated[
        Path | None, typer.Option("--emit-config", metavar="FILE", help="Write what was found here, for --config.")
    ] = None,
    num_prompts: Annotated[int, typer.Option("--num-prompts", min=1, help="Requests of each measurement.")] = 16,
    max_concurrency: Annotated[
        int | None, typer.Option("--max-concurrency", min=1, help="Requests at a time. Default: 1 for latency, else 8.")
    ] = None,
    repeats: Annotated[int, typer.Option("--repeat", min=1, help="Pairs of measurements a candidate.")] = 3,
    minutes: Annotated[float, typer.Option("--minutes", min=0, help="After so many, nothing more is tried.")] = 15.0,
) -> None:
    """Measure which threads and step sizes suit a model here; answers stay the same.

    What counts is --goal: the time of a request for latency, else tokens a second. Each candidate is measured in turns
    with what is best so far, and taken if it wins every time, by more than 3 % in the median.
    """
    from penstock.cli.terminal import configure_logging, print_table

    configure_logging(quiet=True)
    if emit_config is not None and not emit_config.parent.is_dir():
        raise ConfigError(f"--emit-config names {emit_config}, but there is no folder {emit_config.parent}.")
    at_once = max_concurrency or (1 if engine.goal == "latency" else 8)
    jobs = make_jobs(replace(workload, num_prompts=num_prompts))
    latency = engine.goal == "latency"

    async def measure(settings: Settings) -> float:
        chosen: dict[str, Any] = dict(settings)
        return (await _measured(replace(engine, **chosen), jobs, at_once, latency=latency))[0]

    async def search() -> tuple[Tuning, EngineInfo]:
        _, info = await _measured(engine, jobs[:1], 1, latency=latency)
        given = _settings(engine, info)
        tuning = Tuning(given, _candidates(given), repeats, time.monotonic() + 60 * minutes)
        await tuning.run(measure, lambda line: typer.echo(line, err=True))
        return tuning, info

    tuning, info = asyncio.run(search())
    rows = [(n, str(v), f"{ratio:.2f}", "taken" if taken else "") for n, v, ratio, taken in tuning.found]
    print_table("tune", ("setting", "value", "ratio", ""), rows)
    text = config_file(engine, workload, info, tuning, at_once)
    if emit_config is None:
        typer.echo("\n" + text, nl=False)
    else:
        try:
            emit_config.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{emit_config} cannot be written: {error.strerror or error}.") from None


async def _measured(
    engine: EngineOptions, jobs: Sequence[Job], at_once: int, *, latency: bool
) -> tuple[float, EngineInfo]:
    """Requests a second of one client, or tokens a second of all, and the engine's facts."""
    from penstock.cli.load import engine_sender
    from penstock.cli.start import start

    llm = await start(engine)
    try:
        send = await engine_sender(llm)
        await send(warm_up(jobs[0]))
        records, seconds = await drive(jobs, send, max_concurrency=at_once)
        failed = next((record.error for record in records if record.error is not None), None)
        if failed is not None:
            raise EngineDeadError(f"a request failed, so nothing can be compared: {failed}")
        tokens = sum(record.prompt_tokens + record.output_tokens for record in records)
        score = len(records) / sum(record.e2el for record in records) if latency else tokens / seconds
        return score, llm.info
    finally:
        await llm.close()


def _settings(engine: EngineOptions, info: EngineInfo) -> dict[str, int]:
    """What an engine was told of the settings that are tried, or has derived."""
    derived = {row.name: row.value for row in info.settings}
    threads = engine.threads or int(derived["threads"])
    return {"threads": threads, "max_num_batched_tokens": info.max_num_batched_tokens}


def _candidates(given: Mapping[str, int]) -> dict[str, list[int]]:
    threads = given["threads"]
    fewer = sorted({max(1, threads // 2), max(1, threads - 1)} - {threads}, reverse=True)
    return {"threads": fewer, "max_num_batched_tokens": list(_STEP_TOKENS)}


def config_file(
    engine: EngineOptions, workload: WorkloadOptions, info: EngineInfo, tuning: Tuning, at_once: int
) -> str:
    """A file for --config, with what was measured beside each setting."""
    from penstock.cli.doctor import cpu_name

    shape = f"prompts of {workload.input_len} tokens, answers of {workload.output_len}, {at_once} at a time"
    lines = [
        f"# {info.model} on {cpu_name()}; goal {engine.goal}; {shape}.",
        "# Made by `penstock tune`; ratios are of medians, measured in turns.",
    ]
    for name, value in tuning.best.items():
        tried = [f"{other}: {ratio:.2f} x" for n, other, ratio, _ in tuning.found if n == name]
        remark = f"  # {', '.join(tried)} what was best before" if tried else "  # nothing else was tried"
        lines.append(f"{name.replace('_', '-')}: {value}{remark}")
    return "\n".join(lines) + "\n"
