"""ServerMetrics: what /metrics tells Prometheus, with vLLM's names under ``mini_vllm:``.

Counts and gauges are read from the engine's snapshot when they are asked for; times are observed as outputs
arise, in the engine's thread.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from minivllm.engine.async_engine import AsyncEngine, RequestTimes
from minivllm.engine.outputs import RequestOutput

LABELS = ["model_name"]
#: Upper ends of the buckets, in seconds and in tokens.
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 30, 60)
_BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5)
_REQUEST = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class ServerMetrics:
    """Owner of the registry. It is the AsyncEngine's ``Observer``."""

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._registry = CollectorRegistry()
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN
        )
        self._between_tokens = self._histogram(
            "inter_token_latency_seconds", "From one token of a request to its next.", _BETWEEN_TOKENS
        )
        self._whole = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the last token.", _REQUEST
        )
        self._queue = self._histogram(
            "request_queue_time_seconds", "From arrival to the first step.", _REQUEST
        )
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "From the first step to the first token.", _REQUEST
        )
        self._decode = self._histogram(
            "request_decode_time_seconds", "From the first token to the last.", _REQUEST
        )
        self._step_tokens = self._histogram(
            "iteration_tokens_total", "Tokens that went through the model in a step.", _TOKENS
        )
        self._success = Counter(
            "mini_vllm:request_success",
            "Choices that are over, of which a request has one for each prompt and each n.",
            [*LABELS, "finished_reason"],
            registry=self._registry,
        )
        self._prompt_tokens = Counter(
            "mini_vllm:prompt_tokens",
            "Prompt tokens of the requests answered.",
            LABELS,
            registry=self._registry,
        ).labels(model_name)

    def watch(self, engine: AsyncEngine) -> None:
        """Also tell what this engine counts."""
        self._registry.register(_EngineCollector(engine, self._model_name))

    def text(self) -> bytes:
        """All of it, in Prometheus' text format."""
        return generate_latest(self._registry)

    def step(self, num_tokens: int) -> None:
        """See ``Observer``."""
        self._step_tokens.observe(num_tokens)

    def output(self, output: RequestOutput, times: RequestTimes, now: float) -> None:
        """See ``Observer``."""
        num_tokens = output.num_tokens
        if num_tokens and times.last_token_at is None:
            self._first_token.observe(now - times.arrived_at)
            self._prompt_tokens.inc(len(output.prompt_token_ids))
            if output.admitted_at is not None:
                self._queue.observe(output.admitted_at - times.arrived_at)
                self._prefill.observe(now - output.admitted_at)
        elif output.embedding is not None:
            self._prompt_tokens.inc(len(output.prompt_token_ids))
        elif num_tokens and times.last_token_at is not None:
            self._between_tokens.observe(now - times.last_token_at)
        for completion in output.outputs:
            if completion.finish_reason is not None:
                self._success.labels(self._model_name, completion.finish_reason).inc()
        if output.finished:
            self._whole.observe(now - times.arrived_at)
            if num_tokens or times.first_token_at is not None:
                self._decode.observe(now - (times.first_token_at or now))

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(f"mini_vllm:{name}", text, LABELS, buckets=buckets, registry=self._registry)
        return histogram.labels(self._model_name)


@dataclass(frozen=True)
class _EngineCollector(Collector):
    """The engine's counts, as of its last step."""

    engine: AsyncEngine
    model_name: str

    def collect(self) -> Iterator[Metric]:
        """For the registry."""
        counts = self.engine.snapshot
        used = 1 - counts.num_free_blocks / counts.num_blocks
        gauges = {
            "num_requests_running": (counts.num_running, "Sequences in the batch."),
            "num_requests_waiting": (self.engine.num_waiting, "Requests that no step has begun."),
            "kv_cache_usage_perc": (used, "Share of the KV blocks in use; 1 is all of them."),
        }
        counters = {
            "prefix_cache_queries": (counts.queried_tokens, "Prompt tokens looked up in the prefix cache."),
            "prefix_cache_hits": (counts.cached_tokens, "Prompt tokens found there."),
            "generation_tokens": (counts.generated_tokens, "Tokens generated."),
            "num_preemptions": (counts.preemptions, "Sequences that gave their blocks back and began again."),
        }
        for kind, family in ((gauges, GaugeMetricFamily), (counters, CounterMetricFamily)):
            for name, (value, text) in kind.items():
                metric = family(f"mini_vllm:{name}", text, labels=LABELS)
                metric.add_metric([self.model_name], value)
                yield metric
