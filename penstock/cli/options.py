"""Flags that several commands share, kept in tables: a command gets the whole group as one object."""

from __future__ import annotations

import copy
import functools
import inspect
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Final, get_args

import typer

from penstock.cli.command import completion, model_names, one_of, parser_names
from penstock.cli.named_model import find_model
from penstock.config.data_parallel import ROUTING_POLICIES
from penstock.config.environment import read_environment
from penstock.config.kv_events import HASH_ALGORITHMS
from penstock.config.limits import DRAIN_TIMEOUT_S, MAX_QUEUE_SECONDS, MAX_TOP_LOGPROBS, WATERMARK_KEY
from penstock.config.logprobs import LOGPROBS_MODES
from penstock.config.model_settings import POOLINGS, with_pooling
from penstock.config.names import BUNDLED_MODEL
from penstock.config.options import ROUTING_SPELLINGS, SHORT_TYPES, EngineOptions, ServerOptions
from penstock.config.quantisation import QUANTIZE_FORMATS
from penstock.config.resolve import ARITHMETICS, DEVICES, DTYPES, GOALS, ISAS, KV_CACHE_DTYPES, LOAD_FORMATS, POLICIES
from penstock.library.resolve import UnknownModelError, with_draft_path

_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_MODEL = "Model"
_MEMORY = "Memory"
_SCHEDULING = "Scheduling"
_COMPUTE = "Compute"
_NETWORK, _SAMPLING = "Network", "Sampling"
_ADAPTERS = "Adapters"
COMMON: Final = frozenset(
    (
        *("device", "dtype", "quantize", "threads", "max_model_len", "kv_cache_memory", "seed", "goal", "max_users"),
        *("served_model_name", "host", "port", "api_key", "temperature", "max_tokens"),
        *("dataset", "path", "num_prompts", "input_len", "output_len", "json_path"),
    )
)
"""Flags that the short help shows."""


def parse_bytes(text: str) -> int:
    """Bytes of a size such as 2GiB, 512MB, 1.5g or 1048576; K, KiB and kiB are 1024, KB is 1000.

    Raises:
        typer.BadParameter: it is no size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise typer.BadParameter(f"{text!r} is no size; write for example 2GiB, 512MiB or a number of bytes.")
    number, unit, suffix = match.groups()
    decimal = bool(unit) and (suffix or "").lower() == "b"
    return int(float(number) * (1000 if decimal else 1024) ** _UNITS[unit.lower()])


def flag(
    name: str, kind: Any, default: Any, panel: str, help: str, *spellings: str, **settings: Any
) -> inspect.Parameter:
    """A keyword parameter that Typer turns into an option; without spellings its flag is the name with dashes."""
    spelt = spellings or ("--" + name.replace("_", "-"),)
    settings.setdefault("hidden", name not in COMMON)
    option = typer.Option(*spelt, help=help, rich_help_panel=panel, **settings)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


def _model() -> inspect.Parameter:
    help = (
        "A model's name (`penstock pull` lists the spellings), a Hugging Face folder or a .gguf file; without it the "
        "small model that ships with Penstock."
    )
    argument = typer.Argument(metavar="MODEL", help=help, show_default=False, autocompletion=model_names)
    annotation = Annotated[str | None, argument]
    return inspect.Parameter("model", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


MODEL_FLAGS = (
    _model(),
    flag("device", str, "auto", _COMPUTE,
         "Where to compute: auto, cpu, cuda, rocm, xpu or mps; cuda:1 for another GPU than the first.",
         autocompletion=completion(DEVICES)),
    flag("dtype", str, "auto", _COMPUTE, "Type of the computation.", **one_of(DTYPES, SHORT_TYPES)),
    flag("quantize", str | None, None, _COMPUTE,
         "Quantise float weights while they load, for example q4_k_m, q8_0, int8 or fp8: all get the main format of "
         "that name, tables q8_0.", **{**one_of(QUANTIZE_FORMATS), "metavar": "FORMAT"}),
    flag("kv_cache_dtype", str, "auto", _MEMORY,
         "Type of cached keys and values.", **one_of(KV_CACHE_DTYPES, SHORT_TYPES)),
    flag("pack_cache", str, "auto", _MEMORY,
         "Folder that keeps weights as they are packed, for faster starts; off for none.", metavar="FOLDER"),
    flag("pack_cache_size", str | None, None, _MEMORY,
         "What that folder may hold, for example 40GiB; the least recently used goes first. Default: half of the room "
         "there.", metavar="SIZE"),
    flag("load_format", str, "auto", _MODEL,
         "auto: the weights in the model's files; dummy: random ones, for which a config.json is enough.",
         **one_of(LOAD_FORMATS)),
    flag("hf_overrides", str | None, None, _MODEL,
         "Other values for fields of the model's configuration, in JSON.", metavar="JSON"),
    flag("isa", str | None, None, _COMPUTE,
         "Force an instruction set. Default: the best.", **one_of(ISAS)),
    flag("arithmetic", str, "strict", _COMPUTE,
         "strict: one arithmetic for all rows; fast: another for generated tokens, where there are matrix units.",
         **one_of(ARITHMETICS)),
    flag("batch_invariant", bool, False, _COMPUTE,
         "Products whose bits do not depend on how many rows a step has: on GPUs by own kernels, not torch's.",
         "--batch-invariant/--no-batch-invariant"),
    flag("threads", int | None, None, _COMPUTE,
         "Threads of the kernels, of all processes together. Default: the cores this process may use."),
    flag("tensor_parallel_size", int, 1, _COMPUTE,
         "Processes that share every layer's weights and compute each step together.",
         "--tensor-parallel-size", "-tp", "--tp-size", "--tp"),
    flag("decode_context_parallel_size", int, 1, _COMPUTE,
         "How many of these processes share a context's keys and values where each would keep the same ones.",
         "--decode-context-parallel-size", "-dcp", "--dcp-size"),
    flag("prefill_context_parallel_size", int, 1, _COMPUTE,
         "1, or the same number: prompts are attended to by the processes that have their keys and values.",
         "--prefill-context-parallel-size", "-pcp"),
    flag("pipeline_parallel_size", int, 1, _COMPUTE,
         "Processes that the layers are dealt to, one part after the other.",
         "--pipeline-parallel-size", "-pp", "--pp-size", "--pp"),
    flag("pipeline_layer_split", str | None, None, _COMPUTE,
         "Layers of each of them, as in 10,12. Default: dealt so that all take about as long."),
    flag("remote_workers", int, 0, _COMPUTE,
         "How many of these processes, the last ones, join from other machines (penstock worker)."),
    flag("workers_address", str | None, None, _COMPUTE,
         "Where those join, with the token in PENSTOCK_WORKER_TOKEN.", metavar="HOST:PORT"),
    flag("distributed_executor_backend", str, "mp", _COMPUTE,
         "What starts processes: mp here, ray on the nodes of a Ray cluster, for all stages but the first."),
    flag("enable_expert_parallel", bool, False, _COMPUTE,
         "Processes that share layers have whole experts each, which they do in any case.",
         "--enable-expert-parallel", "-ep"),
    flag("enable_eplb", bool, False, _COMPUTE,
         "Experts change places between these processes so that all have about as much to compute."),
    flag("num_redundant_experts", int, 0, _COMPUTE,
         "Copies of each layer's busiest experts, which several processes then compute by turns.",
         "--num-redundant-experts", "--ep-num-redundant-experts"),
    flag("eplb_step_interval", int, 1000, _COMPUTE,
         "Steps after which it is looked whether experts are well placed.",
         "--eplb-step-interval", "--eplb-rebalance-num-iterations"),
    flag("data_parallel_size", int, 1, _COMPUTE,
         "Engines of the model, among which requests are dealt.",
         "--data-parallel-size", "-dp", "--dp-size", "--dp"),
    flag("routing_policy", str, "cost", _SCHEDULING,
         "How requests are dealt to engines. Default: to the one that will have computed the prompt first.",
         **one_of(ROUTING_POLICIES, ROUTING_SPELLINGS)),
    flag("max_model_len", int | None, None, _MEMORY, "Longest prompt plus output, tokens. Default: the model's own."),
    flag("goal", str, "balanced", _SCHEDULING,
         "What counts: latency, answers that begin soon and flow evenly; throughput, many tokens in all.",
         **one_of(GOALS)),
    flag("max_users", int | None, None, _SCHEDULING, "How many write at the same time: sets batch and cache by it."),
    flag("max_num_seqs", int | None, None, _SCHEDULING, "Most sequences in one step."),
    flag("max_num_batched_tokens", int | None, None, _SCHEDULING, "Most tokens in one step."),
    flag("max_chunk_tokens", int | None, None, _SCHEDULING,
         "Most tokens of one request in a step, so that long prompts advance side by side."),
    flag("block_size", int, 16, _MEMORY, "Tokens in one block of the KV cache."),
    flag("gpu_memory_utilization", float, 0.9, _MEMORY,
         "Share of a GPU's memory that weights, steps and KV cache may fill together."),
    flag("memory", str | None, None, _MEMORY,
         "What weights, a step and KV cache may fill together, for example 8GiB; of all models, where there are "
         "several. Default: what is free.", metavar="SIZE"),
    flag("kv_cache_memory", str | None, None, _MEMORY,
         "KV cache size, for example 2GiB. Default: from what is free; on a GPU what weights and a step leave.",
         "--kv-cache-memory", "--kv-cache-memory-bytes", metavar="SIZE"),
    flag("kv_blocks", int | None, None, _MEMORY, "Exact number of KV blocks; comes before --kv-cache-memory."),
    flag("kv_ram", str | None, None, _MEMORY,
         "Memory for copies of what the KV cache gives up, for example 4GiB. Default: none.",
         "--kv-ram", metavar="SIZE"),
    flag("kv_disk", str | None, None, _MEMORY,
         "Disk for copies of all that is computed, for example 20GiB: it is there after a restart. Default: none.",
         "--kv-disk", metavar="SIZE"),
    flag("kv_disk_path", str | None, None, _MEMORY,
         "The folder of --kv-disk. Default: one in your cache folder.", "--kv-disk-path", metavar="FOLDER"),
    flag("kv_events_config", str | None, None, _MEMORY,
         'Publish which blocks the KV cache has, for example {"enable_kv_cache_events": true, "endpoint": '
         '"tcp://*:5557"}: who subscribes reads the prompts. Default: nobody is told.', metavar="JSON"),
    flag("prefix_caching_hash_algo", str, "sha256_cbor", _MEMORY,
         "How blocks are named to those: as vLLM does, by a hash that others can compute.",
         **one_of(HASH_ALGORITHMS)),
    flag("kv_store", str | None, None, _MEMORY,
         "A store of copies that engines share: redis://HOST:6379/0, s3://BUCKET/PREFIX, lm://HOST, "
         "mooncake://HOST. Default: none.",
         "--kv-store", metavar="URL"),
    flag("kv_store_seconds", int | None, None, _MEMORY,
         "Seconds after which a copy in Redis that nobody has read is gone; 0: never. Default: a day.",
         "--kv-store-seconds", metavar="SECONDS"),
    flag("enable_prefix_caching", bool, True, _MEMORY, "Reuse computed prefixes across requests.",
         "--enable-prefix-caching/--no-enable-prefix-caching"),
    flag("policy", str, "fcfs", _SCHEDULING, "Who is served first.", "--scheduling-policy", **one_of(POLICIES)),
    flag("depth", int | None, None, _SCHEDULING,
         "Steps planned ahead of the one that runs: 0 or 1. Default: 1 on a GPU, else 0."),
    flag("async_scheduling", bool, False, _SCHEDULING, "The same as --depth 1.", "--async-scheduling"),
    flag("enforce_eager", bool, False, _COMPUTE,
         "Run every step layer by layer; else a GPU's decode steps are recorded as graphs.", "--enforce-eager"),
    flag("speculative_config", str | None, None, _SCHEDULING,
         'Propose tokens that a step verifies, for example {"method": "suffix"}; answers stay the same. '
         "Default: no drafts.",
         "--speculative-config", "-sc", metavar="JSON"),
    flag("enable_prompt_embeds", bool, False, _MODEL,
         "Take prompts that are rows of the embedding (prompt_embeds), not tokens.", "--enable-prompt-embeds"),
    flag("enable_lora", bool, False, _ADAPTERS, "Take low-rank adapters.", "--enable-lora"),
    flag("max_loras", int, 8, _ADAPTERS, "Adapters that the sequences of a step may have together."),
    flag("max_lora_rank", int, 16, _ADAPTERS, "The largest rank of an adapter."),
    flag("max_cpu_loras", int | None, None, _ADAPTERS,
         "Adapters of that rank for which there is memory. Default: --max-loras."),
    flag("max_lora_bytes", str | None, None, _ADAPTERS,
         "Memory of one adapter: 300MiB, 2GiB. Default: what that rank takes of all layers, with one expert of each.",
         metavar="SIZE"),
    flag("control_vector", list[str] | None, None, _ADAPTERS,
         "A control vector (.gguf) that all answers have, and how much of it (1); repeatable.",
         "--control-vector", metavar="PATH[:SCALE]"),
    flag("control_vector_layers", str | None, None, _ADAPTERS,
         "Only behind these layers, counted from 0. Default: all that it has.", metavar="FIRST-LAST"),
    flag("seed", int | None, None, _COMPUTE,
         "Where random streams start; equal seeds give equal answers. Default: 0; for `run` another each time."),
)  # fmt: skip
PARSER_FLAGS = (
    flag("tool_call_parser", str | None, None, _MODEL,
         "Format in which answers call functions, for example hermes; none for none. Default: from the chat template.",
         metavar="NAME", autocompletion=parser_names("tool_names")),
    flag("reasoning_parser", str | None, None, _MODEL,
         "Format in which answers reason, for example qwen3; none for none. Default: from the chat template.",
         metavar="NAME", autocompletion=parser_names("reasoning_names")),
)  # fmt: skip
POOLING_FLAGS = (
    flag("pooler_config", str | None, None, _MODEL,
         "How the model pools, in JSON: pooling_type, use_activation, dimensions, enable_chunked_processing, "
         "max_embed_len.", metavar="JSON"),
    flag("pooling", str | None, None, _MODEL,
         "Which tokens an embedding is made of; none: a vector for each. Default: as the model's files say.",
         **one_of(POOLINGS)),
)  # fmt: skip
LOGPROB_FLAGS = (
    flag("max_logprobs", int, MAX_TOP_LOGPROBS, _MODEL,
         "Most alternatives of a token that requests may ask for; -1 for the whole vocabulary."),
    flag("logprobs_mode", str, "raw_logprobs", _MODEL,
         "What is told as log-probabilities: the model's own, or what samplers and masks leave; or their logits.",
         **one_of(LOGPROBS_MODES)),
    flag("watermark_key", int, WATERMARK_KEY, _MODEL,
         "A number of your own by which watermarked texts are recognised; keep it to yourself.", metavar="NUMBER"),
    flag("logits_processors", list[str] | None, None, _MODEL,
         "A class or function that changes logits for requests that name it; name=module:function gives it another "
         "name; repeatable.", "--logits-processors", metavar="MODULE:CLASS"),
)  # fmt: skip
SHARING_FLAGS = (
    flag("share_prefix_cache", bool, False, _MEMORY,
         "Share computed prefixes across API keys; their owners can tell who sent what another sent before.",
         "--share-prefix-cache"),
    flag("shared_prompts", list[Path] | None, None, _MEMORY,
         "A system prompt to compute at start and keep for all keys; repeatable.", "--shared-prompt", metavar="FILE"),
)  # fmt: skip
SERVED_NAME_FLAG = flag("served_model_name", str | None, None, _MODEL, "The name clients use. Default: the folder's.")
SERVER_FLAGS = (
    flag("host", str, "127.0.0.1", _NETWORK, "Address to listen on; a public one needs --api-key."),
    flag("port", int, 8000, _NETWORK, "Port to listen on; 0 lets the system choose."),
    flag("api_key", list[str] | None, None, _NETWORK,
         "A key clients must send as a bearer token; repeatable. Also: environment variable PENSTOCK_API_KEY."),
    flag("admin_key", list[str] | None, None, _NETWORK,
         "A key that may load and unload models; repeatable. Default: whoever may ask may do that."),
    flag("pre", str | None, None, _NETWORK,
         "A Python function that gets the body of each request, and gives the one that is asked instead.",
         metavar="MODULE:FUNCTION"),
    flag("post", str | None, None, _NETWORK,
         "A Python function that gets each whole answer, and gives what is told instead.", metavar="MODULE:FUNCTION"),
    flag("allowed_origins", list[str] | None, None, _NETWORK,
         "A web origin that may call the API besides those of this machine (localhost); repeatable. none: not even "
         "those.", "--allowed-origins", "--cors-origins"),
    flag("page", bool, True, _NETWORK, "Give browsers a page to talk to the models with.", "--page/--no-page"),
    flag("log_requests", bool, False, _NETWORK,
         "Log a line for each request: its status, tokens and times; as JSON with PENSTOCK_LOG_FORMAT=json.",
         "--log-requests"),
    flag("otlp_traces_endpoint", str | None, None, _NETWORK,
         "OpenTelemetry collector that gets a span for each request (OTLP over HTTP).", metavar="URL"),
    flag("trust_request_chat_template", bool, False, _NETWORK,
         "Let requests bring a chat template of their own.", "--trust-request-chat-template"),
    flag("responses_store", str, "memory", _NETWORK,
         "File in which responses, conversations and chats are kept; memory keeps them until the server ends, with "
         "several HTTP processes in a file in TMPDIR that goes with it.", metavar="FILE"),
    flag("max_queue_seconds", float, MAX_QUEUE_SECONDS, _NETWORK,
         "Seconds of work that may wait; calls beyond are refused with 429 and Retry-After. inf for no bound."),
    flag("api_server_count", int, 1, _NETWORK,
         "Processes that speak HTTP, over one engine; bounds of what waits are dealt out among them."),
    flag("any_model", bool, False, _NETWORK,
         "Answer calls for any model's name, where one model is served.", "--any-model"),
    flag("aliases", list[str] | None, None, _NETWORK,
         "A further name of the model; repeatable, and several with commas between them.", "--alias", metavar="NAME"),
    flag("mcp_servers", str | None, None, _NETWORK,
         "A file of MCP servers, whose tools POST /tools runs on this machine, each by its policy.",
         metavar="FILE"),
    flag("lora_modules", list[str] | None, None, _ADAPTERS,
         "An adapter that requests may name as their model, and where it lies; repeatable. Implies --enable-lora.",
         metavar="NAME=PATH"),
    flag("lora_pin", list[str] | None, None, _ADAPTERS,
         "An adapter of --lora-modules that stays in memory once it was read; repeatable.", metavar="NAME"),
    flag("lora", list[str] | None, None, _ADAPTERS,
         "An adapter that is in every answer unless a request says otherwise, and how much of it counts (1); "
         "repeatable. Implies --enable-lora.", metavar="PATH[:SCALE]"),
    flag("moderation_model", str | None, None, _NETWORK,
         "The served guard model that /v1/moderations asks where calls name none.", metavar="NAME"),
    flag("slots", bool, True, _NETWORK, "Tell at /slots what is computed.", "--slots/--no-slots"),
    flag("props", bool, False, _NETWORK, "Take POST /props, which has no fields yet.", "--props"),
    flag("slot_save_path", str | None, None, _NETWORK,
         "The folder in which clients save sessions, by POST /slots/{id}?action=save.", metavar="FOLDER"),
    flag("chat_template", str | None, None, _MODEL,
         "A chat template to use instead of the model's own: its text, or a file that holds it.",
         "--chat-template", "--chat-template-file", metavar="TEXT"),
    flag("uds", str | None, None, _NETWORK,
         "Listen on this Unix socket instead of an address; only this user may use it unless there are API keys.",
         metavar="PATH"),
    flag("root_path", str, "", _NETWORK, "The path under which a proxy shows this server.", metavar="PATH"),
    flag("force_include_usage", bool, False, _NETWORK,
         "Streams of chats and completions end with the usage, asked for or not.", "--enable-force-include-usage"),
    flag("tokens_as_ids", bool, False, _NETWORK,
         "Log-probabilities of chats and completions name tokens by their ids.", "--return-tokens-as-token-ids"),
    flag("grpc_port", int | None, None, _NETWORK,
         "Answer KServe's protocol over gRPC on this port too; 0 lets the system choose.", "--grpc-port"),
    flag("drain_timeout", float, DRAIN_TIMEOUT_S, _NETWORK, "Seconds that running requests get after SIGTERM."),
)  # fmt: skip
SAMPLING_FLAGS = (
    flag("max_tokens", int | None, None, _SAMPLING, "Most tokens to generate. Default: up to the context length."),
    flag(
        "temperature",
        float | None,
        None,
        _SAMPLING,
        "0 always takes the most probable token.",
        "--temperature",
        "--temp",
    ),
    flag("top_k", int | None, None, _SAMPLING, "Draw among the k most probable tokens; 0 keeps all."),
    flag("top_p", float | None, None, _SAMPLING, "Draw among the smallest set with this probability."),
    flag("min_p", float | None, None, _SAMPLING, "Drop tokens below this share of the largest probability."),
    flag(
        "repetition_penalty",
        float | None,
        None,
        _SAMPLING,
        "Above 1 discourages tokens already seen.",
        "--repetition-penalty",
        "--repeat-penalty",
    ),
    flag("presence_penalty", float | None, None, _SAMPLING, "Subtracted from tokens already generated."),
    flag("frequency_penalty", float | None, None, _SAMPLING, "Subtracted once per occurrence."),
    flag("stop", list[str] | None, None, _SAMPLING, "A text that ends the answer; repeatable."),
    flag("ignore_eos", bool, False, _SAMPLING, "Go on past the end-of-sequence token.", "--ignore-eos"),
)


def make_engine_options(given: Mapping[str, Any]) -> EngineOptions:
    chosen = dict(given)
    chosen["seed"] = EngineOptions().seed if chosen["seed"] is None else chosen["seed"]
    environment = read_environment()
    chosen["model"] = chosen["model"] or environment.model or EngineOptions().model
    found = find_model(chosen["model"])
    chosen["model"] = str(found.path)
    if found.name is not None:
        chosen["served_model_name"] = chosen.get("served_model_name") or found.name
        chosen |= {name: value for name, value in found.options.items() if chosen.get(name) is None}
    chosen["speculative_config"] = with_draft_path(chosen["speculative_config"], find_model)
    for name in ("isa", "threads"):
        if chosen[name] is None:
            chosen[name] = getattr(environment, name)
    for name in ("memory", "kv_cache_memory", "pack_cache_size", "max_lora_bytes", "kv_ram", "kv_disk"):
        if chosen[name] is not None:
            chosen[name] = parse_bytes(chosen[name])
    if chosen["pack_cache"] == EngineOptions().pack_cache:
        chosen["pack_cache"] = environment.pack_cache
    if (kind := chosen.pop("pooling", None)) is not None:
        chosen["pooler_config"] = with_pooling(chosen["pooler_config"], kind)
    if chosen.pop("async_scheduling"):
        chosen["depth"] = 1
    chosen["enforce_eager"] = chosen["enforce_eager"] or None
    for name in ("logits_processors", "control_vector"):
        chosen[name] = tuple(chosen.get(name) or ())
    chosen["shared_prompts"] = tuple(map(_text_of, chosen.get("shared_prompts") or ()))
    return EngineOptions(**chosen)


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, UnicodeError) as error:
        raise typer.BadParameter(f"{str(path)!r} cannot be read as UTF-8 text: {error}") from None


def freely_seeded(given: Mapping[str, Any]) -> EngineOptions:
    seed = secrets.randbits(63) if given["seed"] is None else given["seed"]
    try:
        return make_engine_options({**given, "seed": seed})
    except UnknownModelError as error:
        if re.search("[/:.]", text := given["model"] or ""):
            raise
        hint = f"A question comes after the model: penstock run {BUNDLED_MODEL} {text!r}"
        raise UnknownModelError(f"{error} {hint}", error.name) from None


def _server_options(given: Mapping[str, Any]) -> ServerOptions:
    chosen = dict(given)
    chosen["api_keys"] = tuple(chosen.pop("api_key") or read_environment().api_keys)
    chosen["admin_keys"] = tuple(chosen.pop("admin_key") or ())
    for name in ("lora_modules", "lora"):
        chosen[name] = tuple(chosen[name] or ())
    if (pins := chosen.pop("lora_pin")) is not None:
        from penstock.host.adapters import pinned

        chosen["lora_modules"] = pinned(chosen["lora_modules"], pins)
    chosen["allowed_origins"] = tuple(chosen["allowed_origins"] or ())
    aliases = ",".join(chosen.pop("aliases") or ()).split(",")
    chosen["aliases"] = tuple(dict.fromkeys(alias.strip() for alias in aliases if alias.strip()))
    if (template := chosen["chat_template"]) is not None and "{" not in template:
        chosen["chat_template"] = _text_of(Path(template))
    return ServerOptions(**chosen)


def _sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    """Only what was given: the rest are the model's own defaults."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in given.items() if v is not None and v != []}


def takes(
    name: str, parameters: Iterable[inspect.Parameter], make: Callable[[Mapping[str, Any]], Any]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: the command's parameter `name` becomes these flags, and it is called with make(their values)."""
    group = tuple(parameters)

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != name]
        signature = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*group, *own)]

        @functools.wraps(command)
        def call(**given: Any) -> Any:
            values = {p.name: given.pop(p.name) for p in group}
            return command(**given, **{name: make(values)})

        setattr(call, "__signature__", inspect.Signature(signature))  # noqa: B010 - mypy knows no such attribute
        call.__annotations__ = {p.name: p.annotation for p in signature}
        return call

    return decorate


takes_engine_options = takes("engine", MODEL_FLAGS, make_engine_options)
takes_freely_seeded_engine_options = takes("engine", MODEL_FLAGS, freely_seeded)
takes_named_engine_options = takes(
    "engine",
    (*MODEL_FLAGS, *PARSER_FLAGS, *POOLING_FLAGS, *LOGPROB_FLAGS, *SHARING_FLAGS, SERVED_NAME_FLAG),
    make_engine_options,
)
takes_server_options = takes("server", SERVER_FLAGS, _server_options)
_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def _in_whole_help(one: inspect.Parameter) -> inspect.Parameter:
    kind, option = get_args(one.annotation)
    option = copy.copy(option)
    option.hidden = True
    return one.replace(annotation=Annotated[kind, option])


takes_default_sampling = takes(
    "sampling", (_in_whole_help(one) for one in SAMPLING_FLAGS if one.name in _DEFAULTS), _sampling
)
takes_sampling = takes("sampling", SAMPLING_FLAGS, _sampling)


def option_fields(options: EngineOptions) -> dict[str, Any]:
    """The options as keywords for `LLM`."""
    return {field.name: getattr(options, field.name) for field in fields(options)}
