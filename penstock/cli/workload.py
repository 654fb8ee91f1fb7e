"""What a load test sends, and when."""

from __future__ import annotations

import asyncio
import csv
import json
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from penstock.cli.measure import RequestRecord
from penstock.config.errors import ConfigError

DATASETS = ("random", "prefix-repetition", "azure", "mooncake", "sharegpt")
_MOONCAKE_BLOCK = 512
_FIRST_ID = 5  # lower ids are control tokens in most vocabularies


@dataclass(frozen=True, slots=True)
class Job:
    """One request to be sent.

    Attributes:
        prompt: text, or token ids.
        max_tokens: length of the answer, or its limit.
        ignore_eos: go on past the end-of-sequence token, so that the answer has exactly max_tokens.
    """

    prompt: str | tuple[int, ...]
    max_tokens: int
    ignore_eos: bool = True


def warm_up(job: Job) -> Job:
    """A job of the same size that leaves nothing in the prefix cache for it to find."""
    return replace(job, prompt=job.prompt[::-1], max_tokens=min(job.max_tokens, 2))


@dataclass(frozen=True, slots=True)
class WorkloadOptions:
    """Which jobs to make.

    Attributes:
        dataset: one of DATASETS.
        path: the CSV or JSONL file of the datasets that are read.
        num_prompts: how many jobs.
        input_len, output_len: tokens of prompt and answer (random, prefix-repetition), or their limits (the others).
        range_ratio: random lengths lie in [len × (1 - ratio), len × (1 + ratio)].
        prefix_len: tokens of a shared prefix; num_prefixes: how many different ones there are.
        vocab_size: token ids are drawn below it.
        seed: equal seeds give equal jobs.
    """

    dataset: str = "random"
    path: Path | None = None
    num_prompts: int = 64
    input_len: int = 128
    output_len: int = 64
    range_ratio: float = 0.0
    prefix_len: int = 256
    num_prefixes: int = 4
    vocab_size: int = 1000
    seed: int = 0


def make_jobs(options: WorkloadOptions) -> list[Job]:
    """The jobs of a run, in order.

    Raises:
        ConfigError: an unknown dataset, a missing or unusable file, or a number out of range.
    """
    _check(options)
    rng = random.Random(options.seed)
    jobs = list(islice(_SOURCES[options.dataset](options, rng), options.num_prompts))
    if not jobs:
        raise ConfigError(f"{options.path} holds no usable request for the dataset {options.dataset!r}.")
    return jobs


def _check(options: WorkloadOptions) -> None:
    if options.dataset not in DATASETS:
        raise ConfigError(f"--dataset is {options.dataset!r}; allowed: {', '.join(DATASETS)}.")
    for name in ("num_prompts", "input_len", "output_len", "num_prefixes"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(options, name)}; allowed: at least 1.")
    if options.prefix_len < 0:
        raise ConfigError(f"--prefix-len is {options.prefix_len}; allowed: at least 0.")
    if options.vocab_size <= _FIRST_ID:
        raise ConfigError(f"--vocab-size is {options.vocab_size}; allowed: more than {_FIRST_ID}.")
    if not 0 <= options.range_ratio < 1:
        raise ConfigError(f"--range-ratio is {options.range_ratio}; allowed: from 0 to below 1.")


def _ids(options: WorkloadOptions, rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(_FIRST_ID, options.vocab_size) for _ in range(count))


def _around(length: int, ratio: float, rng: random.Random) -> int:
    return max(1, rng.randint(round(length * (1 - ratio)), round(length * (1 + ratio))))


def _random(options: WorkloadOptions, rng: random.Random) -> Iterator[Job]:
    while True:
        prompt = _ids(options, rng, _around(options.input_len, options.range_ratio, rng))
        yield Job(prompt, _around(options.output_len, options.range_ratio, rng))


def _prefix_repetition(options: WorkloadOptions, rng: random.Random) -> Iterator[Job]:
    prefixes = [_ids(options, rng, options.prefix_len) for _ in range(options.num_prefixes)]
    while True:
        suffix = _ids(options, rng, _around(options.input_len, options.range_ratio, rng))
        yield Job(rng.choice(prefixes) + suffix, _around(options.output_len, options.range_ratio, rng))


def _azure(options: WorkloadOptions, rng: random.Random) -> Iterator[Job]:
    """Lengths of the Azure LLM inference traces (Patel et al., Splitwise, ISCA 2024), cut to the limits."""
    for context, output in read_azure_lengths(_path(options)):
        yield Job(_ids(options, rng, min(context, options.input_len)), min(output, options.output_len))


def read_azure_lengths(path: Path) -> Iterator[tuple[int, int]]:
    """(context tokens, generated tokens) of every row that generated something.

    Raises:
        ConfigError: the file lacks the trace's columns.
    """
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if not {"ContextTokens", "GeneratedTokens"} <= set(reader.fieldnames or ()):
            raise ConfigError(f"{path} is no Azure trace: it needs the columns ContextTokens and GeneratedTokens.")
        for row in reader:
            context, output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            if context > 0 and output > 0:
                yield context, output


def _sharegpt(options: WorkloadOptions, rng: random.Random) -> Iterator[Job]:
    """Prompts from a JSON array, as ShareGPT's own files are, or from JSON lines: "prompt", "turns", "conversations" or
    "messages"; answers end where the model ends.
    """
    for record in _records(_path(options)):
        prompt = _first_text(record)
        if prompt:
            yield Job(prompt, options.output_len, ignore_eos=False)


def _mooncake(options: WorkloadOptions, rng: random.Random) -> Iterator[Job]:
    """Mooncake's traces (Qin et al., 2407.00079): lengths, and which blocks of 512 tokens requests have in common."""
    blocks: dict[int, tuple[int, ...]] = {}
    for record in _records(_path(options)):
        if not isinstance(record, dict):
            continue
        prompt, answer = record.get("input_length"), record.get("output_length")
        if not (isinstance(prompt, int) and isinstance(answer, int) and prompt > 0 and answer > 0):
            continue
        tokens: list[int] = []
        count = min(prompt, options.input_len)
        shared = record.get("hash_ids")
        for block in shared if isinstance(shared, list) else ():
            if len(tokens) >= count or type(block) is not int:
                break
            if block not in blocks:
                blocks[block] = _ids(options, random.Random(f"{options.seed} {block}"), _MOONCAKE_BLOCK)
            tokens += blocks[block]
        tokens += _ids(options, rng, max(0, count - len(tokens)))
        yield Job(tuple(tokens[:count]), min(answer, options.output_len))


def _records(path: Path) -> Iterator[Any]:
    """The values of a JSON array, or of a file with one a line; lines that are no JSON are passed over.

    Raises:
        ConfigError: the file is an array that is no JSON.
    """
    with path.open(encoding="utf-8") as file:
        if file.read(4096).lstrip()[:1] == "[":
            file.seek(0)
            try:
                yield from json.load(file)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{path} begins as a JSON array, but is none: {error}.") from None
            return
        file.seek(0)
        for line in file:
            with suppress(ValueError, RecursionError):
                yield json.loads(line)


def _first_text(record: object) -> str | None:
    if not isinstance(record, dict):
        return None
    for key, part in (("prompt", None), ("turns", None), ("conversations", "value"), ("messages", "content")):
        value = record.get(key)
        if isinstance(value, list) and value:
            value = value[0]
        if isinstance(value, dict) and part:
            value = value.get(part)
        if isinstance(value, str) and value:
            return value
    return None


def _path(options: WorkloadOptions) -> Path:
    if options.path is None:
        raise ConfigError(f"the dataset {options.dataset!r} is read from a file; name it with --dataset-path.")
    if not options.path.is_file():
        raise ConfigError(f"there is no file at {options.path}; --dataset-path names the dataset's file.")
    return options.path


_SOURCES: dict[str, Callable[[WorkloadOptions, random.Random], Iterator[Job]]] = {
    "random": _random,
    "prefix-repetition": _prefix_repetition,
    "azure": _azure,
    "mooncake": _mooncake,
    "sharegpt": _sharegpt,
}


async def drive(
    jobs: Sequence[Job],
    send: Callable[[Job], Awaitable[RequestRecord]],
    *,
    request_rate: float | None = None,
    max_concurrency: int | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[list[RequestRecord], float]:
    """Sends the jobs and returns their records and the seconds from the first one sent to the last one ended.

    With a request rate the loop is open: gaps between requests are exponential (a Poisson process), whatever the
    server does. Without one, all are sent at once; max_concurrency then makes the loop closed. With both, requests
    arrive at the rate but wait their turn at the client. `progress` is told (requests ended, requests in all).
    """
    ended = 0
    rng = random.Random(seed)
    slots = asyncio.Semaphore(max_concurrency or len(jobs))
    started = time.perf_counter()
    due = 0.0

    async def one(job: Job, at: float) -> RequestRecord:
        await asyncio.sleep(max(0.0, started + at - time.perf_counter()))
        nonlocal ended
        async with slots:
            record = await send(job)
        ended += 1
        progress(ended, len(jobs))
        return record

    tasks = []
    for job in jobs:
        tasks.append(asyncio.ensure_future(one(job, due)))
        if request_rate:
            due += rng.expovariate(request_rate)
    try:
        records = list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
    return records, max(record.end for record in records) - min(record.start for record in records)
