"""Prometheus metrics of the server and its engine. Names begin with `deltagram_`."""

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_STEP_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)


class Metrics:
    """`model` and `step` take the engine's messages; the server observes the rest."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"deltagram_{name}", text, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"deltagram_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"deltagram_{name}", text, labels, buckets=buckets, registry=registry)

        self.gauges = {
            "running": gauge("running", "Sequences that run."),
            "waiting": gauge("waiting", "Sequences that wait in the engine."),
            "pages_used": gauge("cache_pages_used", "Pages of the cache that sequences hold."),
            "slots_used": gauge("state_slots_used", "Slots of recurrent state that sequences own."),
            "prefix_pages": gauge("prefix_pages", "Pages of the cache that only kept prefixes hold; free when needed."),
            "prefix_checkpoints": gauge("prefix_checkpoints", "States kept for prefixes that requests share."),
        }
        self.in_flight = gauge("in_flight", "Sequences admitted and not ended.")
        self.cache_pages = gauge("cache_pages", "Pages of the cache.")
        self.state_slots = gauge("state_slots", "Slots of recurrent state.")
        self.table_rows = Gauge(
            "deltagram_table_rows", "Rows of n-gram tables, by where they are.", ["tier"], registry=registry
        )
        self.table_bytes = Gauge(
            "deltagram_table_bytes", "Bytes of n-gram tables, by where they are.", ["tier"], registry=registry
        )
        self.counts = {
            "prefill_tokens": counter("prefill_tokens", "Tokens run as parts of prompts."),
            "decode_tokens": counter("decode_tokens", "Tokens that decode and verify steps added."),
            "drafted_tokens": counter("drafted_tokens", "Drafts that were verified."),
            "accepted_tokens": counter("accepted_tokens", "Drafts that were right."),
            "padding_tokens": counter("padding_tokens", "Tokens that only filled a bucket."),
            "memory_rows": counter("memory_rows", "Rows of n-gram tables looked up."),
            "preemptions": counter("preemptions", "Sequences pushed out for want of pages."),
            "eager_segments": counter("eager_segments", "Parts of captured steps that no graph held."),
            "run_ahead_hits": counter("run_ahead_hits", "Memory chains that were done when their layer asked."),
            "run_ahead_stalls": counter("run_ahead_stalls", "Memory chains that their layer waited for."),
            "run_ahead_stall_seconds": counter("run_ahead_stall_seconds", "What layers waited for memory chains."),
            "prefix_hits": counter("prefix_hits", "Requests that began with a prefix computed before."),
            "prefix_tokens": counter("prefix_tokens", "Tokens that they did not compute."),
            "prefix_evictions": counter("prefix_evictions", "States of prefixes given up for others."),
            "num_steps": counter("steps", "Steps run."),
        }
        self.prefix_misses = counter("prefix_misses", "Requests that began with none, by reason.", "reason")
        self.cached_rows = {
            "hits": counter("cached_row_hits", "Rows of n-gram tables that a cache had."),
            "lookups": counter("cached_row_lookups", "Rows of n-gram tables asked of a cache."),
        }
        self.requests = counter("requests", "Requests that generate, by how they ended.", "outcome")
        self.shed = histogram(
            "shed_seconds", "From a request's arrival, or the end of its body if that is read, to its 503.", _SECONDS
        )
        self.ttft = histogram("time_to_first_token_seconds", "From admission to a sequence's first token.", _SECONDS)
        self.tpot = histogram("time_per_output_token_seconds", "Mean of a sequence after its first token.", _SECONDS)
        self.step_seconds = histogram(
            "step_seconds", "Steps, by kind and by tokens x sequences, both rounded up to a power of two.",
            _STEP_SECONDS, "kind", "size",
        )  # fmt: skip
        self._before: dict[str, float] = {}

    def model(self, facts: dict[str, Any]) -> None:
        """Take what the engine says of its model (worker.py)."""
        self.cache_pages.set(facts["num_pages"])
        self.state_slots.set(facts["max_num_sequences"])
        for tier, rows, size in facts["tables"]:
            self.table_rows.labels(tier).inc(rows)
            self.table_bytes.labels(tier).inc(size)

    def step(self, message: dict[str, Any]) -> None:
        """Take an engine's message (worker.py)."""
        for name, value in message["gauges"].items():
            self.gauges[name].set(value)
        for name, value in message["counts"].items():
            self._rise(name, value, self.counts[name])
        for reason, value in message["prefix_misses"].items():
            self._rise(f"prefix_misses {reason}", value, self.prefix_misses.labels(reason))
        if message["cached_rows"] is not None:
            for (name, count), value in zip(self.cached_rows.items(), message["cached_rows"], strict=True):
                self._rise(f"cached_rows {name}", value, count)
        if (record := message["step"]) is not None:
            size = f"{_round_up(record['tokens'])}x{_round_up(record['sequences'])}"
            self.step_seconds.labels(record["kind"], size).observe(record["ms"] / 1e3)

    def _rise(self, name: str, value: float, counter: Counter) -> None:
        """Bring a counter to `value`, of the engine's own count `name`."""
        counter.inc(value - self._before.get(name, 0))
        self._before[name] = value

    def text(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)


def _round_up(count: int) -> int:
    """So that labels stay few when every step has a bucket of its own size."""
    return 1 << max(count - 1, 0).bit_length()
