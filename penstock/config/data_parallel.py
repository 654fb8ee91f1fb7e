"""Options that have several engines serve one model: what may be asked, and each one's part of the machine."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, Final

from penstock.config.errors import ConfigError
from penstock.config.kv_events import kv_events
from penstock.config.options import EngineOptions
from penstock.config.ranks import part_of, rank_count, remote_ranks

ROUTING_POLICIES: Final = ("cost", "cache-aware", "session", "adapter", "power-of-two", "round-robin")
MOST_ENGINES: Final = 64


def check_data_parallel(options: EngineOptions) -> None:
    """Raises ConfigError for numbers of engines that there cannot be, and for what does not go with several."""
    size, policy = options.data_parallel_size, options.routing_policy
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MOST_ENGINES:
        raise ConfigError(f"--data-parallel-size is {size!r}; allowed: an integer from 1 to {MOST_ENGINES}.")
    if policy not in ROUTING_POLICIES:
        raise ConfigError(f"--routing-policy is {policy!r}; allowed: {', '.join(ROUTING_POLICIES)}.")
    if size > 1 and (refused := _refusal(options)):
        raise ConfigError(f"--data-parallel-size {size}: {refused}")


def check_one_engine(options: EngineOptions, what: str) -> None:
    """Raises ConfigError where several engines are asked for and `what`, a clause, is one's alone."""
    if options.data_parallel_size > 1:
        raise ConfigError(f"--data-parallel-size {options.data_parallel_size}: {what}. Leave it out.")


def _refusal(options: EngineOptions) -> str:
    """What of these options several engines cannot do, and what to do instead; "" where there is nothing."""
    if options.device not in ("auto", "cpu"):
        return (
            f"--device {options.device} is one engine's; several share this machine's cores. Take --device cpu, or "
            "start a server for each GPU."
        )
    if remote_ranks(options):
        flag = "--remote-workers" if options.remote_workers else "--distributed-executor-backend ray"
        return f"workers of other machines join one engine. Leave {flag} out, or --data-parallel-size."
    if options.kv_disk:
        return "a folder of copies belongs to one engine. Take --kv-ram, or --kv-store, which engines share."
    if (events := kv_events(options.kv_events_config)) is not None:
        asked = [place for place in (events.endpoint, events.replay_endpoint) if place is not None]
        places = [_numbered(place, number) for place in asked for number in range(options.data_parallel_size)]
        fixed = [place for place in places if not place.endswith(":*")]
        if len({*fixed}) < len(fixed):
            return "ports of --kv-events-config go up by one an engine. Have its two as far apart as there are engines."
    return ""


def engine_options(options: EngineOptions, number: int, memory: int | None) -> EngineOptions:
    """What engine `number` is asked for, of those that share what was asked for; `memory` is what it may fill.

    Threads are each engine's all, where they are shared out as engines work (`config.cores`); ranks of several
    processes, which cannot change theirs, get a part for good.
    """
    count, threads = options.data_parallel_size, options.threads
    if threads is not None and rank_count(options) > 1:
        threads = max(1, part_of(threads, number, count))
    return replace(
        options,
        data_parallel_size=1,
        device="cpu",
        threads=threads,
        memory=memory,
        kv_cache_memory=_part(options.kv_cache_memory, count),
        kv_ram=_part(options.kv_ram, count),
        kv_events_config=_own_endpoints(options.kv_events_config, number),
    )


def _part(size: int | None, count: int) -> int | None:
    return None if size is None else max(1, size // count)


def _own_endpoints(text: str | None, number: int) -> str | None:
    """With this engine's number, and endpoints of its own: ports go up by one an engine, as vLLM's do, files get it."""
    if text is None or kv_events(text) is None:
        return text
    given: dict[str, Any] = json.loads(text)
    given["data_parallel_rank"] = number
    asked = kv_events(text)
    for name in ("endpoint", "replay_endpoint"):
        endpoint = getattr(asked, name)
        if endpoint is not None:
            given[name] = _numbered(endpoint, number)
    return json.dumps(given)


def _numbered(endpoint: str, number: int) -> str:
    if endpoint.startswith("ipc://"):
        return endpoint if number == 0 else f"{endpoint}_dp{number}"
    base, _, port = endpoint.rpartition(":")
    return endpoint if port == "*" else f"{base}:{int(port) + number}"
