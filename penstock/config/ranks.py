"""Options that have one model computed by several processes: what may be asked, and each one's part of the machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from penstock.config.cache_spec import RUN
from penstock.config.errors import ConfigError
from penstock.config.options import EngineOptions
from penstock.config.speculation import HEADS, speculation

MOST_COPIES: Final = 4096  # of a layer's experts
_OVER_ROWS: Final = ("nvfp4", "fp8_block")  # formats of which a scale counts for several rows
BACKENDS: Final = ("mp", "ray")  # of --distributed-executor-backend
MOST_RANKS: Final = 8  # processes of one model, which is how many segments sums are cut into


def rank_count(options: EngineOptions) -> int:
    """Processes that compute the model together."""
    return options.tensor_parallel_size * options.pipeline_parallel_size


def remote_ranks(options: EngineOptions) -> int:
    """Those of them that are of other machines, or are started as if they were."""
    by_ray = options.distributed_executor_backend == "ray" and not options.remote_workers
    return rank_count(options) - 1 if by_ray else options.remote_workers


def local_ranks(options: EngineOptions) -> int:
    """Those of them that are of this machine."""
    return rank_count(options) - remote_ranks(options)


def check_ranks(options: EngineOptions) -> None:
    """Raises ConfigError for numbers of processes that there cannot be, and for what does not go with several."""
    sizes = {"--tensor-parallel-size": options.tensor_parallel_size}
    sizes["--pipeline-parallel-size"] = options.pipeline_parallel_size
    for flag, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MOST_RANKS:
            raise ConfigError(
                f"{flag} is {size!r}; allowed: an integer from 1 to {MOST_RANKS}. Sums over what processes share are "
                f"cut into at most {MOST_RANKS} segments, of which each owns whole ones."
            )
    if rank_count(options) > MOST_RANKS:
        product = " times ".join(f"{flag} {size}" for flag, size in sizes.items())
        raise ConfigError(f"{product} is {rank_count(options)} processes; one model has at most {MOST_RANKS}.")
    remote = options.remote_workers
    if isinstance(remote, bool) or not isinstance(remote, int) or not 0 <= remote < rank_count(options):
        most = rank_count(options) - 1
        raise ConfigError(
            f"--remote-workers is {remote!r}; allowed: an integer from 0 to {most}, one less than there are processes."
        )
    backend = options.distributed_executor_backend
    if backend not in BACKENDS:
        raise ConfigError(f"--distributed-executor-backend is {backend!r}; allowed: {', '.join(BACKENDS)}.")
    by_ray = backend == "ray"
    if by_ray and options.pipeline_parallel_size == 1:
        raise ConfigError("--distributed-executor-backend ray is for stages. Take --pipeline-parallel-size 2 or more.")
    if not by_ray and (remote > 0) != (options.workers_address is not None):
        raise ConfigError("--remote-workers and --workers-address go together: how many processes join, and where.")
    _check_experts(options)
    _check_contexts(options)
    if rank_count(options) > 1 and (refused := _refusal(options)):
        raise ConfigError(f"{several(options)}: {refused}")


def alone(options: EngineOptions) -> EngineOptions:
    """What a process is asked for that is told its share by another."""
    whole = replace(options, tensor_parallel_size=1, pipeline_parallel_size=1, remote_workers=0, workers_address=None)
    whole = replace(whole, distributed_executor_backend="mp")
    whole = replace(whole, decode_context_parallel_size=1, prefill_context_parallel_size=1)
    return replace(whole, enable_expert_parallel=False, enable_eplb=False, num_redundant_experts=0)


def context_block(options: EngineOptions) -> int:
    """Tokens of a block of which processes that share contexts have whole runs: as many as asked for, or some more."""
    shared = RUN * options.decode_context_parallel_size
    return options.block_size if shared == RUN else -(-options.block_size // shared) * shared


def _check_contexts(options: EngineOptions) -> None:
    """Raises ConfigError for contexts that processes cannot share."""
    sharing, prompts = options.decode_context_parallel_size, options.prefill_context_parallel_size
    for flag, size in (("decode", sharing), ("prefill", prompts)):
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MOST_RANKS:
            name = f"--{flag}-context-parallel-size"
            raise ConfigError(f"{name} is {size!r}; allowed: an integer from 1 to {MOST_RANKS}.")
    if options.tensor_parallel_size % sharing:
        raise ConfigError(
            f"--decode-context-parallel-size is {sharing}; allowed: what divides --tensor-parallel-size, "
            f"{options.tensor_parallel_size}, the processes among which contexts are shared."
        )
    if prompts not in (1, sharing):
        raise ConfigError(
            f"--prefill-context-parallel-size is {prompts}; allowed: 1 or --decode-context-parallel-size, {sharing}. "
            "Prompts are attended to by the processes that keep their keys and values."
        )


def _check_experts(options: EngineOptions) -> None:
    """Raises ConfigError for what cannot be asked of experts that processes share."""
    columns = options.tensor_parallel_size
    if options.enable_expert_parallel and columns == 1:
        raise ConfigError("--enable-expert-parallel is for processes that share layers. Take --tensor-parallel-size.")
    if options.enable_eplb and not options.enable_expert_parallel:
        raise ConfigError("--enable-eplb has experts change places. Take --enable-expert-parallel too.")
    if options.enable_eplb and options.pipeline_parallel_size > 1:
        raise ConfigError("--enable-eplb is for processes that share every layer. Leave --pipeline-parallel-size out.")
    if options.enable_eplb and options.enable_lora:
        raise ConfigError("--enable-eplb needs experts that are dealt, and with --enable-lora all processes have all.")
    copies, interval = options.num_redundant_experts, options.eplb_step_interval
    if isinstance(copies, bool) or not isinstance(copies, int) or not 0 <= copies <= MOST_COPIES:
        raise ConfigError(f"--num-redundant-experts is {copies!r}; allowed: an integer from 0 to {MOST_COPIES}.")
    if copies and not options.enable_eplb:
        raise ConfigError(f"--num-redundant-experts {copies} needs --enable-eplb, which says where copies are.")
    if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
        raise ConfigError(f"--eplb-step-interval is {interval!r}; allowed: an integer of at least 1.")


def several(options: EngineOptions) -> str:
    """The flags that ask for several processes, for the beginning of a refusal."""
    sizes = {"--tensor-parallel-size": options.tensor_parallel_size}
    sizes["--pipeline-parallel-size"] = options.pipeline_parallel_size
    return " ".join(f"{flag} {size}" for flag, size in sizes.items() if size > 1)


def _refusal(options: EngineOptions) -> str:
    """What of these options several processes cannot do, and what to do instead; "" where there is nothing."""
    if options.device not in ("auto", "cpu"):
        return f"--device {options.device} is one process's; several compute on CPUs. Take --device cpu."
    if remote_ranks(options) and options.tensor_parallel_size > 1:
        return (
            "processes that share every layer exchange sums through the memory of one machine. Deal layers to those of "
            "other machines, with --pipeline-parallel-size alone."
        )
    if options.quantize in _OVER_ROWS and options.tensor_parallel_size > 1:
        return f"scales of {options.quantize} are over rows that several processes have. Take another format."
    if (options.kv_ram or options.kv_disk or options.kv_store) and options.decode_context_parallel_size > 1:
        return (
            "with --decode-context-parallel-size each process has some positions of a block, and copies are of whole "
            "ones. Leave --kv-ram, --kv-disk and --kv-store out."
        )
    drafts = speculation(options.speculative_config)
    if drafts is not None and drafts.method == "self" and options.pipeline_parallel_size > 1:
        return "the target's first layers cannot draft while the first stage computes with them. Take a draft model."
    if drafts is not None and drafts.method in HEADS and options.pipeline_parallel_size > 1:
        return f"a head ({drafts.method}) reads tables that lie with the last stage. Take a draft model."
    return ""


def check_alone(options: EngineOptions, what: str) -> None:
    """Raises ConfigError where several processes are asked for and `what`, a clause, is one's alone."""
    if rank_count(options) > 1:
        raise ConfigError(f"{several(options)}: {what} in one process. Leave it out.")


def part_of(total: int, rank: int, count: int) -> int:
    """A rank's part of so many things: even parts, larger ones first."""
    return (total + count - 1 - rank) // count


def rank_threads(threads: int, rank: int, count: int) -> int:
    """Threads of a rank, of so many cores that all of them have on this machine: one at least."""
    return max(1, part_of(threads, rank, count))


def own_threads(options: EngineOptions) -> int | None:
    """Threads that were asked for, of the process that leads; None where they were not."""
    return None if options.threads is None else rank_threads(options.threads, 0, local_ranks(options))
