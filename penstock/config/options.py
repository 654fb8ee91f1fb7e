"""Options as people give them. Frozen; `auto` (None) is resolved once, in `config.resolve`, never changed in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.config.limits import DRAIN_TIMEOUT_S, MAX_QUEUE_SECONDS, MAX_TOP_LOGPROBS, WATERMARK_KEY
from penstock.config.logits_processors import spellings
from penstock.config.model_settings import as_json

GPUS = ("cuda", "rocm", "xpu", "mps")
ROUTING_SPELLINGS = {
    "round_robin": "round-robin",
    "roundrobin": "round-robin",
    "power_of_two": "power-of-two",
    "cache_aware": "cache-aware",
    "prefixaware": "cache-aware",
    "kvaware": "cost",
}
"""What SGLang's router and vLLM's production stack call some of them."""
SHORT_TYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What an engine is asked to be.

    Attributes:
        model: a Hugging Face folder, a .gguf file, or "penstock-concierge" (the bundled model).
        served_model_name: the name clients use; None takes the folder's or file's name.
        device: "auto", "cpu", or one of GPUS: NVIDIA, AMD, Intel and Apple, "cuda:1" for another than the first
            ("interpreter", for tests, runs the kernels of "cuda" slowly on the CPU).
        dtype: "auto", "float32", "bfloat16" or "float16", or short as in SHORT_TYPES: compute and weights.
        kv_cache_dtype: "auto", "float32", "bfloat16", "float16", "fp8", "int8" or "int4": keys and values in the cache.
        pack_cache: folder of packed weights, "off", or "auto": the user's cache folder, for models worth it.
        pack_cache_size: bytes that files of this folder may take; None for half of what would be free there without
            them. What was used least recently goes first.
        load_format: "auto": what the model's files hold; "dummy": random weights, for which config.json is enough.
        quantize: a format of `config.quantisation` that float weights get while they load; None keeps them.
        isa: "auto" or a native instruction set to force: "generic", "avx2", "avx512", "avx512_bf16", "amx"
            ("amx_emulated", for tests, computes the same slowly).
        arithmetic: "strict": one for all rows of a weight; "fast": where there are matrix units, they multiply prompt
            tokens, and generated ones are multiplied as integers.
        batch_invariant: all products by kernels whose sums have one order however many rows a step has: on a GPU plain
            weights too, which otherwise torch multiplies. What no such kernel serves is refused.
        threads: threads of native and torch kernels, of all processes of this machine together; None takes the cores
            this process may use.
        tensor_parallel_size: processes that share the weights of every layer.
        decode_context_parallel_size: neighbours of those that share contexts where each would else keep the same keys
            and values: latent attention, and fewer KV heads than processes.
        prefill_context_parallel_size: 1, or the same number: prompts are attended to by the same processes.
        pipeline_parallel_size: processes that layers are dealt to.
        pipeline_layer_split: layers of each of those, as in "10,12"; None deals them by what a step reads of each.
        remote_workers: how many of these processes, the last ones, are those of other machines.
        workers_address: HOST:PORT where those join, with the token in PENSTOCK_WORKER_TOKEN; None without any, or
            where Ray starts them.
        distributed_executor_backend: what starts processes: "mp" those of this machine; "ray" has a Ray cluster start
            those of all stages but the first.
        enable_expert_parallel: processes that share layers have whole experts each, as they have in any case.
        enable_eplb: experts change places between those, as measured loads say.
        num_redundant_experts: copies of each layer's busiest experts, beside one of each.
        eplb_step_interval: steps after which it is looked whether experts are well placed.
        data_parallel_size: engines of the model, each of as many processes as the options above say, among which
            requests are dealt.
        routing_policy: how they are dealt, one of `config.data_parallel.ROUTING_POLICIES`.
        max_model_len: longest prompt plus output, tokens; None takes the model's own, shrunk to what memory holds.
        goal: what options are derived for: "balanced", "latency" or "throughput".
        max_users: how many ask at the same time, for whom sequences in a step and KV cache are derived; or None.
        max_num_seqs: most sequences in one step; None derives it.
        max_num_batched_tokens: token budget of one step; None derives it.
        max_chunk_tokens: most tokens of one request in a step, so that several long prompts advance side by side; None
            for the whole budget.
        block_size: tokens in one KV block.
        gpu_memory_utilization: share of a GPU's memory, above 0 and at most 1, that all together may fill.
        memory: bytes of this machine's memory that weights, a step and the KV cache may fill together, of which the KV
            cache takes what the others leave; None for what is free.
        kv_cache_memory: bytes for the KV cache; None derives it from free memory, on a GPU from what a step leaves.
        kv_blocks: exact number of KV blocks (tests, benchmarks); overrides kv_cache_memory.
        kv_ram: bytes of this machine's memory for copies of blocks that leave the device; None for none.
        kv_disk: bytes of a disk for copies of all that is computed, which are there after a restart; None for none.
        kv_disk_path: the folder of those; None for the user's cache folder.
        kv_events_config: who is told which blocks there are: `config.kv_events.KVEvents` in JSON; None for nobody.
        prefix_caching_hash_algo: by which blocks are named to them: "sha256_cbor" or "sha256".
        kv_store: the address of a store of copies that engines share; None for none.
        kv_store_seconds: after which a copy in Redis that nobody has read is gone, 0 for never; None for a day.
        enable_prefix_caching: keep and reuse computed prefixes across requests.
        share_prefix_cache: across owners (API keys) too, who can then learn from `cached_tokens` and from the time to a
            first token whether somebody else has sent a prompt.
        shared_prompts: system prompts computed at start and kept for all owners.
        policy: "fcfs" or "priority".
        depth: plans in flight while the next is made (0 or 1); None takes 1 on a GPU.
        enforce_eager: run all steps layer by layer, none as recorded graphs; None does that where there is no GPU.
        seed: seed of requests that bring none.
        tool_call_parser, reasoning_parser: names of the formats in which answers call functions and reason
            (docs/tools.md), "none" for none; None finds them from the chat template.
        max_logprobs: most alternatives of a token that requests may ask for, -1 for the whole vocabulary.
        logprobs_mode: what is told as log-probabilities, one of `config.logprobs.LOGPROBS_MODES`.
        speculative_config: how tokens are proposed that a step verifies, JSON as `config.speculation` reads it; None
            for no drafts.
        hf_overrides: values for fields of the model's configuration, an object or its JSON.
        pooler_config: how the model pools, under vLLM's names: `config.model_settings.PoolerSettings`, or its JSON.
        enable_prompt_embeds: requests may bring rows of the embedding in the place of tokens of their prompts.
        enable_lora: requests may have low-rank adapters.
        max_loras: adapters that the sequences of a step may have together.
        max_lora_rank: the largest rank of one.
        max_cpu_loras: adapters of that rank for which there is memory; None for max_loras.
        max_lora_bytes: memory of one; None for what that rank takes of all layers, with an expert of each layer.
        control_vector: what is added to the hidden states of all answers, files each as path or path:scale.
        control_vector_layers: the layers behind which it is, as first-last; None for all it has.
        watermark_key: the number by which watermarked texts are recognised, of requests that bring none of their own.
        logits_processors: what requests may name as their logits_processors: "module:Class", "module:function" or
            "name=module:function" of each; in Python functions and classes too.
    """

    model: str = "penstock-concierge"
    served_model_name: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    pack_cache: str = "auto"
    pack_cache_size: int | None = None
    load_format: str = "auto"
    quantize: str | None = None
    isa: str = "auto"
    arithmetic: str = "strict"
    batch_invariant: bool = False
    threads: int | None = None
    tensor_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    pipeline_layer_split: str | None = None
    remote_workers: int = 0
    workers_address: str | None = None
    distributed_executor_backend: str = "mp"
    enable_expert_parallel: bool = False
    enable_eplb: bool = False
    num_redundant_experts: int = 0
    eplb_step_interval: int = 1000
    data_parallel_size: int = 1
    routing_policy: str = "cost"
    max_model_len: int | None = None
    goal: str = "balanced"
    max_users: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_chunk_tokens: int | None = None
    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    memory: int | None = None
    kv_cache_memory: int | None = None
    kv_blocks: int | None = None
    kv_ram: int | None = None
    kv_disk: int | None = None
    kv_disk_path: str | None = None
    kv_events_config: str | None = None
    prefix_caching_hash_algo: str = "sha256_cbor"
    kv_store: str | None = None
    kv_store_seconds: int | None = None
    enable_prefix_caching: bool = True
    share_prefix_cache: bool = False
    shared_prompts: tuple[str, ...] = ()
    policy: str = "fcfs"
    depth: int | None = None
    enforce_eager: bool | None = None
    seed: int = 0
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    max_logprobs: int = MAX_TOP_LOGPROBS
    logprobs_mode: str = "raw_logprobs"
    speculative_config: str | None = None
    hf_overrides: str | None = None
    pooler_config: str | None = None
    enable_prompt_embeds: bool = False
    enable_lora: bool = False
    max_loras: int = 8
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None
    max_lora_bytes: int | None = None
    control_vector: tuple[str, ...] = ()
    control_vector_layers: str | None = None
    watermark_key: int = WATERMARK_KEY
    logits_processors: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "logits_processors", spellings(self.logits_processors))
        for name in ("dtype", "kv_cache_dtype"):
            value = getattr(self, name)
            if isinstance(value, str):
                object.__setattr__(self, name, SHORT_TYPES.get(value, value))
        object.__setattr__(self, "routing_policy", ROUTING_SPELLINGS.get(self.routing_policy, self.routing_policy))
        for name in ("hf_overrides", "pooler_config", "kv_events_config"):
            object.__setattr__(self, name, as_json(getattr(self, name), name))

    @property
    def device_kind(self) -> str:
        """`device` without a number."""
        return self.device.partition(":")[0]

    @property
    def on_gpu(self) -> bool:
        return self.device_kind in GPUS

    @property
    def torch_device(self) -> str:
        """What torch calls `device`, once that is resolved."""
        return "cpu" if self.device == "interpreter" else self.device.replace("rocm", "cuda")


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """What the scheduler needs, all resolved.

    Attributes:
        max_num_seqs: rows of the batch.
        max_num_batched_tokens: token budget of a step.
        max_model_len: longest prompt plus output.
        block_size: tokens in one block.
        num_blocks: per cache group, blocks in its pool (block 0, never handed out, included).
        enable_prefix_caching, policy, depth, max_chunk_tokens, share_prefix_cache: as in EngineOptions.
        recurrent: whether layers keep states, so that a sequence can go on from another's blocks only at a checkpoint.
        checkpoints: slots for copies of states, behind those of the rows.
        whole_prompts: a prompt is computed in one step: its tokens see those after them.
        stages: that a step passes through; above 1 plans in flight have no sequence in common whose token is not known.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: tuple[int, ...]
    enable_prefix_caching: bool = True
    policy: str = "fcfs"
    depth: int = 0
    max_chunk_tokens: int | None = None
    recurrent: bool = False
    checkpoints: int = 0
    whole_prompts: bool = False
    share_prefix_cache: bool = False
    stages: int = 1

    @property
    def most_chunk(self) -> int:
        """Most tokens of one sequence in a step."""
        return min(self.max_num_batched_tokens, self.max_chunk_tokens or self.max_num_batched_tokens)


@dataclass(frozen=True, slots=True)
class HostOptions:
    """How a server keeps several models.

    Attributes:
        memory: bytes that their engines may take together; None for most of what is free at the start.
        keep_alive: seconds that a model stays loaded after its last use; None for ever.
        first: a model that is loaded at the start; None for none.
    """

    memory: int | None = None
    keep_alive: float | None = 300.0
    first: str | None = None


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How the HTTP server listens.

    Attributes:
        host: address to bind; a public one needs an API key.
        port: 0 lets the system choose.
        api_keys: accepted keys; empty means open (loopback only).
        drain_timeout: seconds given to running requests after SIGTERM.
        max_queue_seconds: work that may wait, in seconds, before calls are refused; infinite for no bound.
        allowed_origins: CORS origins besides those of this machine, which are allowed unless "none" stands alone.
        trust_request_chat_template: requests may bring a chat template of their own, run within the same bounds.
        responses_store: file in which responses and conversations are kept, "memory" to keep them until the server
            ends.
        admin_keys: keys that may load and unload models; empty lets whoever may ask do that.
        pre, post: "module:function" of a function that gets each request, or each whole answer, and gives what is asked
            or told instead; None for none.
        page: browsers get a page to talk to the models with.
        log_requests: a line in the log for each request, with its tokens and times.
        otlp_traces_endpoint: web address of an OpenTelemetry collector that gets a span for each request (OTLP over
            HTTP); None for none.
        api_server_count: processes that speak HTTP, all on one socket and over one engine.
        any_model: a server of one model answers calls for whatever name.
        aliases: further names of that model.
        slots, props: whether GET /slots tells what is computed, and POST /props is taken.
        slot_save_path: the folder in which clients save what llama-server's slots have; None for none.
        default_sampling: values for sampling fields that calls leave out, before those of the model's files.
        chat_template: the source of a chat template to use instead of the model's own.
        uds: path of a Unix socket to listen on instead of an address; None for an address.
        root_path: the path under which a proxy shows this server, "" for none.
        force_include_usage: streams of chats and completions end with the usage, asked for or not.
        tokens_as_ids: their log-probabilities name tokens by their ids.
        grpc_port: port of KServe's gRPC service on the same address, 0 lets the system choose; None for none.
        lora_modules: adapters that requests may name as a model, each as name=path or vLLM's JSON.
        lora: adapters that are in every answer unless a request says otherwise, each as path or path:scale.
        mcp_servers: a file of MCP servers whose tools run on this machine; None for none.
        moderation_model: the served guard model that /v1/moderations asks where calls name none; None for none.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    drain_timeout: float = DRAIN_TIMEOUT_S
    max_queue_seconds: float = MAX_QUEUE_SECONDS
    allowed_origins: tuple[str, ...] = ()
    trust_request_chat_template: bool = False
    responses_store: str = "memory"
    admin_keys: tuple[str, ...] = ()
    pre: str | None = None
    post: str | None = None
    page: bool = True
    log_requests: bool = False
    otlp_traces_endpoint: str | None = None
    api_server_count: int = 1
    any_model: bool = False
    aliases: tuple[str, ...] = ()
    slots: bool = True
    props: bool = False
    slot_save_path: str | None = None
    default_sampling: tuple[tuple[str, float], ...] = ()
    chat_template: str | None = None
    uds: str | None = None
    root_path: str = ""
    force_include_usage: bool = False
    tokens_as_ids: bool = False
    grpc_port: int | None = None
    moderation_model: str | None = None
    mcp_servers: str | None = None
    lora_modules: tuple[str, ...] = ()
    lora: tuple[str, ...] = ()
