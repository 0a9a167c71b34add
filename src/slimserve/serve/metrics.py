"""Prometheus metrics: what the server saw itself, and the engine's counters read at each scrape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from slimserve.engine.messages import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_INTER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0)
_TOTAL = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


class _EngineCollector(Collector):
    """The engine's own counters, as of the last scrape."""

    def __init__(self) -> None:
        self.stats = EngineStats()
        self.up = False

    def collect(self) -> Iterator[Metric]:
        stats = self.stats
        gauges = (
            ("slimserve_up", "1 if the engine answered", 1.0 if self.up else 0.0),
            ("slimserve_requests_waiting", "requests in the queue", stats.num_waiting),
            ("slimserve_requests_running", "requests that own cache and take part in steps", stats.num_running),
            ("slimserve_cache_used_bytes", "cache bytes in use", stats.cache_used),
            ("slimserve_cache_total_bytes", "cache bytes there are", stats.cache_total),
            ("slimserve_cache_usage", "share of the cache in use", stats.cache_used / max(1, stats.cache_total)),
        )
        for name, words, value in gauges:
            yield GaugeMetricFamily(name, words, value=float(value))
        counters = (
            ("slimserve_prefix_query_tokens", "prompt tokens looked up in the prefix cache", stats.prefix_query_tokens),
            ("slimserve_prefix_hit_tokens", "prompt tokens reused from the prefix cache", stats.prefix_hit_tokens),
            ("slimserve_preemptions", "requests taken off the device to be recomputed", stats.num_preemptions),
            ("slimserve_steps", "engine steps", stats.num_steps),
            ("slimserve_decode_rows", "requests that decoded, summed over steps", stats.decode_rows),
            ("slimserve_decode_tokens", "tokens that those gave: per row, the tokens of a step", stats.decode_tokens),
        )
        for name, words, value in counters:
            yield CounterMetricFamily(name, words, value=float(value))
        cut = CounterMetricFamily(
            "slimserve_prefix_cut", "requests whose reusable prefix was cut short, by what cut it", labels=["by"]
        )
        for name, value in sorted(stats.cut_by.items()):
            cut.add_metric([name], float(value))
        yield cut
        yield from _drafting(stats)


def _drafting(stats: EngineStats) -> Iterator[Metric]:
    """Drafts by drafter and position, and what the control of drafting decided."""
    for name, words, total, by_position in (
        ("drafted", "tokens drafted", stats.num_drafted, stats.drafted_at),
        ("accepted", "drafted tokens that held", stats.num_accepted, stats.accepted_at),
    ):
        yield CounterMetricFamily(f"slimserve_{name}_tokens", words, value=float(total))
        family = CounterMetricFamily(
            f"slimserve_{name}_tokens_by_position", f"{words}, by their place in the draft",
            labels=["drafter", "position"],
        )  # fmt: skip
        for position, count in enumerate(by_position, start=1):
            family.add_metric([stats.drafter, str(position)], float(count))
        yield family
    for name, words, values in (
        ("length", "drafts per request and step that the control allows now, 0 = off", stats.draft_lengths),
        ("gain", "measured tokens per second with drafts over those without", stats.draft_gains),
    ):
        gauge = GaugeMetricFamily(
            f"slimserve_draft_{name}", f"{words}, by batch size up to", labels=["drafter", "rows"]
        )
        for rows, value in sorted(values.items()):
            gauge.add_metric([stats.drafter, str(rows)], float(value))
        yield gauge
    decisions = CounterMetricFamily(
        "slimserve_draft_decisions", "decisions of the control of drafting", labels=["drafter", "kind"]
    )
    decisions.add_metric([stats.drafter, "switch"], float(stats.draft_switches))
    decisions.add_metric([stats.drafter, "length"], float(stats.draft_length_changes))
    yield decisions


class Metrics:
    """All metrics of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._engine = _EngineCollector()
        self.registry.register(self._engine)
        self.requests = Counter(
            "slimserve_requests",
            "HTTP requests by endpoint and how they ended (stop, length, tool_calls, disconnect, or the error's code)",
            ["endpoint", "outcome"],
            registry=self.registry,
        )
        self.prompt_tokens = Counter("slimserve_prompt_tokens", "prompt tokens served", registry=self.registry)
        self.cached_tokens = Counter(
            "slimserve_cached_prompt_tokens", "prompt tokens served from the prefix cache", registry=self.registry
        )
        self.generated_tokens = Counter("slimserve_generation_tokens", "tokens generated", registry=self.registry)
        self.first_token = Histogram(
            "slimserve_time_to_first_token_seconds",
            "from the request's arrival to its first token",
            buckets=_FIRST_TOKEN,
            registry=self.registry,
        )
        self.inter_token = Histogram(
            "slimserve_inter_token_seconds",
            "between tokens of one choice (a step's time divided by the tokens it brought)",
            buckets=_INTER_TOKEN,
            registry=self.registry,
        )
        self.total = Histogram(
            "slimserve_request_seconds", "from arrival to the end", buckets=_TOTAL, registry=self.registry
        )

    def show_memory(self, planned: Mapping[str, int], measured: Mapping[str, int]) -> None:
        """Planned and measured bytes by group, set once when the engine is up; their difference where both exist."""
        for name, words, values in (
            ("planned", "memory that the plan gives a group", planned),
            ("measured", "memory that a group was measured to take at start", measured),
            (
                "unplanned",
                "measured minus planned",
                {group: measured[group] - planned[group] for group in planned if group in measured},
            ),
        ):
            gauge = Gauge(f"slimserve_memory_{name}_bytes", words, ["group"], registry=self.registry)
            for group, value in values.items():
                gauge.labels(group).set(value)

    def render(self, stats: EngineStats | None) -> bytes:
        """The text for a scrape; `stats` None = the engine did not answer."""
        self._engine.up = stats is not None
        if stats is not None:
            self._engine.stats = stats
        return generate_latest(self.registry)
