"""Prometheus metrics: every figure has one source and is shown under Penstock's name and those of other engines."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.samples import Sample

from penstock.config.engine_stats import EngineStats
from penstock.config.errors import PenstockError
from penstock.core.request import FinishReason
from penstock.engine.api import EngineClient

_MOST_TOLD = 64  # adapters in a label
# Penstock's name (a counter's without _total) → the names that dashboards made for vLLM, TGI and SGLang read.
ALIASES: Mapping[str, tuple[str, ...]] = {
    "penstock_requests_running": ("vllm:num_requests_running", "tgi_batch_current_size", "sglang:num_running_reqs"),
    "penstock_requests_waiting": ("vllm:num_requests_waiting", "tgi_queue_size", "sglang:num_queue_reqs"),
    "penstock_lora_requests_info": ("vllm:lora_requests_info",),
    "penstock_kv_cache_usage_ratio": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"),
    "penstock_prefix_cache_queries": ("vllm:prefix_cache_queries",),
    "penstock_prefix_cache_hits": ("vllm:prefix_cache_hits",),
    "penstock_preemptions": ("vllm:num_preemptions",),
    "penstock_spec_decode_num_drafts": ("vllm:spec_decode_num_drafts",),
    "penstock_spec_decode_num_draft_tokens": ("vllm:spec_decode_num_draft_tokens",),
    "penstock_spec_decode_num_accepted_tokens": ("vllm:spec_decode_num_accepted_tokens",),
    "penstock_spec_decode_num_accepted_tokens_per_pos": ("vllm:spec_decode_num_accepted_tokens_per_pos",),
    "penstock_prompt_tokens": ("vllm:prompt_tokens", "sglang:prompt_tokens"),
    "penstock_cached_prompt_tokens": ("vllm:prompt_tokens_cached", "sglang:cached_tokens"),
    "penstock_generation_tokens": ("vllm:generation_tokens", "sglang:generation_tokens"),
    "penstock_cache_config": ("vllm:cache_config_info",),
    "penstock_requests_finished": ("vllm:request_success", "sglang:num_requests"),
    "penstock_time_to_first_token_seconds": ("vllm:time_to_first_token_seconds", "sglang:time_to_first_token_seconds"),
    "penstock_inter_token_latency_seconds": ("vllm:inter_token_latency_seconds", "sglang:inter_token_latency_seconds"),
    "penstock_time_per_output_token_seconds": (
        "vllm:time_per_output_token_seconds",
        "vllm:request_time_per_output_token_seconds",
        "tgi_request_mean_time_per_token_duration",
    ),
    "penstock_request_seconds": (
        "vllm:e2e_request_latency_seconds",
        "tgi_request_duration",
        "sglang:e2e_request_latency_seconds",
    ),
    "penstock_request_queue_seconds": (
        "vllm:request_queue_time_seconds",
        "tgi_request_queue_duration",
        "sglang:queue_time_seconds",
    ),
    "penstock_request_prefill_seconds": ("vllm:request_prefill_time_seconds",),
    "penstock_request_decode_seconds": ("vllm:request_decode_time_seconds",),
    "penstock_request_inference_seconds": ("vllm:request_inference_time_seconds", "tgi_request_inference_duration"),
    "penstock_request_prompt_tokens": ("vllm:request_prompt_tokens", "tgi_request_input_length"),
    "penstock_request_generation_tokens": ("vllm:request_generation_tokens", "tgi_request_generated_tokens"),
    "penstock_request_params_n": ("vllm:request_params_n",),
    "penstock_request_params_max_tokens": ("vllm:request_params_max_tokens", "tgi_request_max_new_tokens"),
    "penstock_http_requests": ("http_requests",),
    "penstock_http_request_seconds": ("http_request_duration_seconds",),
}

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_TOKENS = tuple(float(2**power) for power in range(0, 21, 2))
_COUNTS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """What is known of an engine when figures are asked for.

    Attributes:
        stats: its counters.
        cache: the geometry of its cache.
        memory: bytes that a host has planned for it; None where there is no host.
        loads: how often a host has loaded it.
    """

    stats: EngineStats = field(default_factory=EngineStats)
    cache: Mapping[str, str] = field(default_factory=dict)
    memory: int | None = None
    loads: int = 0


class AdapterCalls:
    """How many calls wait and run with which adapters, by the adapters' names."""

    def __init__(self) -> None:
        self._waiting, self._running = dict[str, int](), dict[str, int]()
        self._any = False

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """While a call with an adapter waits; "" for none."""
        self._count(self._waiting, name, 1)
        try:
            yield
        finally:
            self._count(self._waiting, name, -1)

    def run(self, name: str, more: int) -> None:
        """A call with an adapter runs, or (-1) does not any more; "" for none."""
        self._count(self._running, name, more)

    def _count(self, calls: dict[str, int], name: str, more: int) -> None:
        if not name:
            return
        self._any = True
        calls[name] = calls.get(name, 0) + more
        if not calls[name]:
            del calls[name]

    def families(self) -> Iterator[Metric]:
        """Their names, once there were any; the value is the time, as dashboards have it from vLLM."""
        if self._any:
            labels = ("running_lora_adapters", "waiting_lora_adapters")
            told = GaugeMetricFamily("penstock_lora_requests_info", "Adapters of calls, by name.", labels=labels)
            names = [",".join(sorted(calls)[:_MOST_TOLD]) for calls in (self._running, self._waiting)]
            told.add_metric(names, time.time())
            yield told


class ModelMetrics:
    """The figures of one model's answers."""

    def __init__(self, name: str, finished: Counter) -> None:
        """`finished` counts the sequences of all models."""
        self._name, self._finished = name, finished
        self.first_token = _histogram("time_to_first_token_seconds", "From arrival to the first token.", _SECONDS)
        self.inter_token = _histogram("inter_token_latency_seconds", "Between two tokens of a sequence.", _SECONDS)
        self.per_token = _histogram("time_per_output_token_seconds", "A sequence's mean after its first.", _SECONDS)
        self.request = _histogram("request_seconds", "From arrival to the last token.", _SECONDS)
        self._queue = _histogram("request_queue_seconds", "From arrival to admission.", _SECONDS)
        self._prefill = _histogram("request_prefill_seconds", "From admission to the first token.", _SECONDS)
        self._decode = _histogram("request_decode_seconds", "From the first token to the last.", _SECONDS)
        self._inference = _histogram("request_inference_seconds", "From admission to the last token.", _SECONDS)
        self.request_prompt = _histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self.request_generation = _histogram("request_generation_tokens", "Tokens a request generated.", _TOKENS)
        self.params_n = _histogram("request_params_n", "The parameter n.", _COUNTS)
        self.params_max_tokens = _histogram("request_params_max_tokens", "The parameter max_tokens.", _TOKENS)
        self.adapters = AdapterCalls()
        self._sources = (
            *(self.first_token, self.inter_token, self.per_token, self.request, self.request_prompt),
            *(self.request_generation, self.params_n, self.params_max_tokens),
            *(self._queue, self._prefill, self._decode, self._inference),
        )

    def phases(self, queued: float, first_token: float, last_token: float) -> None:
        """Counts a request's phases, given its seconds in the queue and from arrival to its first and last token."""
        self._queue.observe(queued)
        self._prefill.observe(max(0.0, first_token - queued))
        self._decode.observe(last_token - first_token)
        self._inference.observe(max(0.0, last_token - queued))

    def pooled(self, prompt_tokens: int, seconds: float) -> None:
        """Counts a prompt that was embedded, classified or scored."""
        self.finished(FinishReason.STOP.value)
        self.request_prompt.observe(prompt_tokens)
        self.request.observe(seconds)

    def finished(self, reason: str) -> None:
        """Counts a sequence that ended."""
        self._finished.labels(self._name, reason).inc()

    def families(self, figures: EngineFigures) -> Iterator[Metric]:
        """Every figure, with the model's name."""
        sources: list[Metric] = [*_of_engines(figures.stats, figures.cache), *_hosted_families(figures)]
        sources += self._llamacpp(figures.stats)
        sources += self.adapters.families()
        for histogram in self._sources:
            sources += histogram.collect()
        for metric in sources:
            metric.samples = [s._replace(labels={"model_name": self._name} | s.labels) for s in metric.samples]
            yield metric

    def _llamacpp(self, stats: EngineStats) -> Iterator[Metric]:
        """What dashboards made for llama-server read. Rates are of all the time in which there was such work."""
        prompt, predicted = stats.prompt_tokens - stats.cached_tokens, stats.generated_tokens
        prompt_s, predicted_s = _sum_of(self._prefill), _sum_of(self._decode)
        for name, about, value in (
            ("prompt_tokens", "Prompt tokens computed.", prompt),
            ("prompt_seconds", "Time in which prompts were computed.", prompt_s),
            ("tokens_predicted", "Tokens generated.", predicted),
            ("tokens_predicted_seconds", "Time in which answers were generated.", predicted_s),
            ("n_decode", "Engine steps.", stats.steps),
            ("spec_decode_num_draft_tokens", "Drafts verified.", stats.drafted_tokens),
            ("spec_decode_num_accepted_tokens", "Drafts that were right.", stats.accepted_tokens),
        ):
            yield CounterMetricFamily(f"llamacpp:{name}", about, value=value)
        for name, about, value in (
            ("prompt_tokens_seconds", "Prompt tokens a second.", prompt / prompt_s if prompt_s else 0.0),
            ("predicted_tokens_seconds", "Generated tokens a second.", predicted / predicted_s if predicted_s else 0.0),
            ("requests_processing", "Sequences in the batch.", stats.running),
            ("requests_deferred", "Sequences queued.", stats.waiting),
            ("n_busy_slots_per_decode", "Tokens generated a step.", predicted / stats.steps if stats.steps else 0.0),
        ):
            yield GaugeMetricFamily(f"llamacpp:{name}", about, value=value)


def _sum_of(histogram: Histogram) -> float:
    """Seconds that a histogram has seen together."""
    samples = (sample for metric in histogram.collect() for sample in metric.samples)
    return sum(sample.value for sample in samples if sample.name.endswith("_sum"))


class Metrics:
    """All figures of one server; also the collector of its own registry, so that nothing is global."""

    def __init__(self) -> None:
        self._models: dict[str, ModelMetrics] = {}
        self._figures: Mapping[str, EngineFigures] = {}
        self._memory_budget: int | None = None
        self._finished = Counter(
            "penstock_requests_finished", "Sequences by reason.", ["model_name", "finished_reason"], registry=None
        )
        self._http = Counter("penstock_http_requests", "HTTP requests.", ["route", "method", "status"], registry=None)
        self._http_seconds = Histogram(
            "penstock_http_request_seconds",
            "From request to end of response.",
            ["route"],
            buckets=_SECONDS,
            registry=None,
        )
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def model(self, name: str) -> ModelMetrics:
        """The figures of a model that is served."""
        if name not in self._models:
            self._models[name] = ModelMetrics(name, self._finished)
        return self._models[name]

    def http(self, route: str, method: str, status: int, seconds: float) -> None:
        """Counts an HTTP request by the route's template, never by its path, so that clients cannot add series."""
        method = method if method in ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS") else "other"
        self._http.labels(route, method, str(status)).inc()
        self._http_seconds.labels(route).observe(seconds)

    def render(self, figures: Mapping[str, EngineFigures], memory_budget: int | None = None) -> bytes:
        """The exposition text (format version 0.0.4) with what is known of the engines, by model.

        `memory_budget`: bytes that a host's models may take together.
        """
        self._figures, self._memory_budget = dict(figures), memory_budget
        for name, of_model in figures.items():
            if of_model.memory or of_model.loads:  # one that nobody has asked yet
                self.model(name)
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Every figure under each of its names; called by the registry."""
        families: dict[str, Metric] = {}
        for name, model in self._models.items():
            for metric in model.families(self._figures.get(name, EngineFigures())):
                known = families.setdefault(metric.name, metric)
                if known is not metric:
                    known.samples += metric.samples
        for metric in (*families.values(), *self._finished.collect(), *self._http.collect()):
            yield from _under_all_names(metric, metric.samples)
        if self._memory_budget is not None:
            about = "Bytes that models may take together."
            yield GaugeMetricFamily("penstock_memory_budget_bytes", about, value=self._memory_budget)
        for metric in self._http_seconds.collect():
            yield from _under_all_names(metric, metric.samples)


def _histogram(name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
    return Histogram(f"penstock_{name}", about, buckets=buckets, registry=None)


def _under_all_names(metric: Metric, samples: Iterable[Sample]) -> Iterator[Metric]:
    samples = [sample for sample in samples if not sample.name.endswith("_created")]
    for name in (metric.name, *ALIASES.get(metric.name, ())):
        renamed = Metric(name, metric.documentation, metric.type, metric.unit if name == metric.name else "")
        renamed.samples = [sample._replace(name=name + sample.name.removeprefix(metric.name)) for sample in samples]
        yield renamed


def _of_engines(stats: EngineStats, cache: Mapping[str, str]) -> Iterator[Metric]:
    """What engines count: where several serve a model, of each one with its number, as vLLM has it."""
    found: dict[str, Metric] = {}
    for number, own in enumerate(stats.engines or (stats,)):
        for metric in _engine_families(own, cache):
            if stats.engines:
                metric.samples = [s._replace(labels={"engine": str(number)} | s.labels) for s in metric.samples]
            known = found.setdefault(metric.name, metric)
            if known is not metric:
                known.samples += metric.samples
    yield from found.values()


def _accepted_by_position(stats: EngineStats) -> Metric:
    about = "Proposals whose drafts were right up to this position."
    family = CounterMetricFamily("penstock_spec_decode_num_accepted_tokens_per_pos", about, labels=["position"])
    for position, accepted in stats.accepted_by_position:
        family.add_metric([str(position)], accepted)
    return family


def _engine_families(stats: EngineStats, cache: Mapping[str, str]) -> Iterator[Metric]:
    used = stats.blocks_used / stats.blocks_total if stats.blocks_total else 0.0
    for name, about, value in (
        ("requests_running", "Sequences in the batch.", stats.running),
        ("requests_waiting", "Sequences queued.", stats.waiting),
        ("waiting_tokens", "Prompt tokens queued.", stats.waiting_tokens),
        ("queue_seconds", "Work queued, in seconds that it is expected to take.", stats.waiting_seconds),
        ("kv_cache_usage_ratio", "KV blocks in use by sequences, of all (0 to 1).", used),
        ("kv_blocks_cached", "KV blocks held by the prefix tree only.", stats.blocks_cached),
        ("kv_blocks_total", "KV blocks.", stats.blocks_total),
        ("kv_below_blocks", "Copies of KV blocks in the tier below.", stats.kv_below_blocks),
        ("kv_below_places", "Copies that the tier below has room for.", stats.kv_below_places),
        ("kv_slots_used", "Token slots written by running sequences.", stats.slots_used),
        ("kv_slots_allocated", "Token slots allocated to running sequences.", stats.slots_allocated),
        ("spec_decode_accepted_now", "Accepted drafts of a proposal that was verified, of late.", stats.accepted_now),
        ("spec_decode_accepted_usually", "The same of thousands of them.", stats.accepted_usually),
    ):
        yield GaugeMetricFamily(f"penstock_{name}", about, value=value)
    for name, about, value in (
        ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_queries),
        ("prefix_cache_hits", "Prompt tokens found there.", stats.prefix_hits),
        ("preemptions", "Sequences preempted.", stats.preemptions),
        ("prompt_tokens", "Prompt tokens admitted.", stats.prompt_tokens),
        ("cached_prompt_tokens", "Of those, taken from the prefix cache.", stats.cached_tokens),
        ("generation_tokens", "Tokens generated.", stats.generated_tokens),
        ("engine_steps", "Engine steps.", stats.steps),
        ("spec_decode_num_drafts", "Times that a sequence's drafts were verified.", stats.drafts),
        ("spec_decode_num_draft_tokens", "Tokens of these drafts.", stats.drafted_tokens),
        ("spec_decode_num_accepted_tokens", "Of those, right ones.", stats.accepted_tokens),
        ("spec_decode_num_drafter_failures", "Drafters that failed and were switched off.", stats.drafter_failures),
        ("engine_sequences_finished", "Sequences that ran to their end.", stats.finished),
        ("engine_sequences_cancelled", "Sequences cancelled.", stats.cancelled),
        ("engine_sequences_failed", "Sequences that failed.", stats.failed),
        ("kv_failed_loads", "Sequences that began anew because blocks could not be loaded.", stats.failed_loads),
        ("engine_restarts", "Engines started in place of one that died.", stats.restarts),
        ("requests_resumed", "Requests that went on in such an engine.", stats.resumed),
    ):
        yield CounterMetricFamily(f"penstock_{name}", about, value=value)
    for name, about, counts in (
        ("prefix_cache_misses", "Lookups short of a whole prompt.", stats.miss_reasons),
        ("admissions_held_back", "Steps in which a gate kept a sequence in the queue.", stats.held_back),
        ("kv_below", "Blocks copied to the tier below and back, by what became of them.", stats.kv_below),
        ("kv_events", "Batches of KV events published, events dropped.", stats.kv_events),
        ("spec_decode_decisions", "Why sequences' steps had the drafts they had.", stats.draft_decisions),
    ):
        family = CounterMetricFamily(f"penstock_{name}", about, labels=["reason"])
        for reason, count in counts:
            family.add_metric([reason], count)
        yield family
    yield _accepted_by_position(stats)
    parts = CounterMetricFamily("penstock_engine_seconds", "Time in the parts of all steps.", labels=["part"])
    for part in ("plan", "build", "forward", "sample", "commit", "stages", "stages_computed", "ranks"):
        parts.add_metric([part], getattr(stats, f"{part}_seconds"))
    yield parts
    if cache:
        config = GaugeMetricFamily("penstock_cache_config", "Geometry of the KV cache.", labels=list(cache))
        config.add_metric(list(cache.values()), 1)
        yield config


def _hosted_families(figures: EngineFigures) -> Iterator[Metric]:
    """What a host knows of a model."""
    if figures.memory is not None:
        about = "Bytes planned for the model's engine and its process; 0 while it is not loaded."
        yield GaugeMetricFamily("penstock_model_memory_bytes", about, value=figures.memory)
        yield CounterMetricFamily("penstock_model_loads", "Times the model was loaded.", value=figures.loads)


async def log_throughput(engines: Callable[[], Mapping[str, EngineClient]], interval: float = 10.0) -> None:
    """Logs one line every `interval` seconds for each engine that worked meanwhile; runs until cancelled."""
    logger = logging.getLogger("penstock.server")
    before: dict[str, EngineStats] = {}
    then = time.monotonic()
    while True:
        await asyncio.sleep(interval)
        there, at = engines(), time.monotonic()
        before = {name: stats for name, stats in before.items() if name in there}
        for name, client in there.items():
            try:
                now = await client.stats()
            except PenstockError:
                continue
            past = before.get(name, EngineStats())
            past = past if past.steps <= now.steps else EngineStats()  # of an engine that has gone since
            if now.steps != past.steps or now.running or now.waiting:
                line = throughput_line(past, now, at - then)
                logger.info("%s", line if len(there) == 1 else f"{name}: {line}")
            before[name] = now
        then = at


def throughput_line(before: EngineStats, now: EngineStats, seconds: float) -> str:
    """One line on what the engine did between two snapshots `seconds` apart."""
    queries, hits = now.prefix_queries - before.prefix_queries, now.prefix_hits - before.prefix_hits
    used = 100 * now.blocks_used / now.blocks_total if now.blocks_total else 0.0
    return (
        f"running {now.running}, waiting {now.waiting}, KV {used:.1f}%, "
        f"prefix hits {100 * hits / queries if queries else 0.0:.1f}%, "
        f"prompt {(now.prompt_tokens - before.prompt_tokens) / seconds:.1f} tok/s, "
        f"generation {(now.generated_tokens - before.generated_tokens) / seconds:.1f} tok/s"
    )
