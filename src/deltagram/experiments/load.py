"""What a load is and what is read off it: arrivals, objectives, the summary, and the files other tools read.

Times are milliseconds from the moment a request is sent. TTFT: to the first text. ITL: between two arrivals of text (of
one token or more). E2EL: to the last text. TPOT: (E2EL - TTFT) / (output tokens - 1), the tokens as the server counts
them, else one per arrival. These are the definitions of `vllm bench serve`, and so are the keys of the summary.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import numpy as np

from deltagram.experiments.fields import Table

ENDPOINTS = ("chat", "completions")
ARRIVALS = ("closed", "poisson", "trace")
TIMES = ("ttft", "tpot", "itl", "e2el")
PERCENTILES = (50, 90, 95, 99)
SUMMARY_BETTER = {
    **{f"{stat}_{time}_ms": "lower" for time in TIMES for stat in ("mean", "median", *(f"p{p}" for p in PERCENTILES))},
    **dict.fromkeys(("request_throughput", "output_throughput", "total_token_throughput"), "higher"),
    **dict.fromkeys(("request_goodput", "slo_share"), "higher"),
}


@dataclass(frozen=True)
class Load:
    """How requests arrive. closed: `concurrency` sessions at a time; poisson: `rate` sessions per second, gaps of a
    gamma distribution of shape `burstiness` (1 is Poisson); trace: at each session's `start_s`. With poisson and
    trace, `concurrency` caps the requests in flight. `duration_s` ends the run; what is in flight is unfinished."""

    arrivals: str = "closed"
    concurrency: int | None = 8
    rate: float | None = None
    burstiness: float = 1.0
    duration_s: float | None = None
    endpoint: str = "chat"
    model: str | None = None  # None: the first model the server lists
    temperature: float = 0.0
    force_lengths: bool = True  # send min_tokens and ignore_eos, so that output lengths are those of the manifest
    extra: Mapping[str, Any] = field(default_factory=dict)  # further keys of the request body
    request_timeout_s: float = 600.0
    slo_ttft_ms: float | None = None
    slo_tpot_ms: float | None = None
    slo_e2el_ms: float | None = None
    slo_share: float = 0.95
    max_lag_ms: float = 20.0  # the client counts as late beyond this
    seed: int = 0


def read_load(table: Table) -> Load:
    """The load keys of a [measure] table; problems go to the table."""
    rate, concurrency = table.number("rate", None), table.integer("concurrency", None, least=1)
    arrivals = table.choice("arrivals", ARRIVALS, "poisson" if rate is not None else "closed")
    if arrivals == "closed" and concurrency is None:
        table.problem("concurrency", "is missing; closed arrivals need the number of sessions at a time")
    if (arrivals == "poisson") != (rate is not None):
        table.problem("rate", f"is {rate!r}; expected sessions per second with arrivals = 'poisson', and only there")
    slo = table.table("slo")
    objectives: dict[str, Any] = {}
    if slo is not None:
        objectives = {f"slo_{key}": slo.number(key, None) for key in ("ttft_ms", "tpot_ms", "e2el_ms")}
        objectives["slo_share"] = slo.number("share", 0.95, below=1.0001)
        slo.done()
    return Load(
        arrivals=arrivals,
        concurrency=concurrency,
        rate=rate,
        burstiness=table.number("burstiness", 1.0),
        duration_s=table.number("duration_s", None),
        endpoint=table.choice("endpoint", ENDPOINTS, "chat"),
        model=table.text("model", None),
        temperature=table.from_zero("temperature", 0.0),
        force_lengths=table.flag("force_lengths", True),
        extra=table.mapping("extra"),
        request_timeout_s=table.number("request_timeout_s", 600.0),
        max_lag_ms=table.number("max_lag_ms", 20.0),
        seed=table.integer("seed", 0),
        **objectives,
    )


@dataclass
class Reply:
    """One request and what came back. `planned_s` is when it should have been sent, `sent_s` when it was: seconds since
    the run began. An `error` leaves the times of what had arrived."""

    session: str
    turn: int
    planned_s: float
    sent_s: float
    asked_tokens: int
    ttft_ms: float = math.nan
    e2el_ms: float = math.nan
    itl_ms: list[float] = field(default_factory=list)
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    text: str = ""
    finish_reason: str | None = None
    error: str | None = None
    finished: bool = True  # False: the run ended first

    @property
    def ok(self) -> bool:
        return self.finished and self.error is None

    @property
    def tpot_ms(self) -> float:
        return (self.e2el_ms - self.ttft_ms) / (self.output_tokens - 1) if self.output_tokens > 1 else math.nan

    def passes(self, load: Load) -> bool:
        """Within every objective that is set; a single token has no TPOT to miss."""
        limits = ((self.ttft_ms, load.slo_ttft_ms), (self.tpot_ms, load.slo_tpot_ms), (self.e2el_ms, load.slo_e2el_ms))
        return self.ok and all(limit is None or not value > limit for value, limit in limits)


@dataclass(frozen=True)
class ClientHealth:
    """Whether the client kept up. lag: how late its event loop woke; late: how late it sent; cpu: share of one core."""

    p99_lag_ms: float
    p99_late_ms: float
    cpu_share: float
    reasons: tuple[str, ...]  # why the client was the bottleneck; () when it was not


@dataclass(frozen=True)
class LoadResult:
    load: Load
    model: str
    replies: Sequence[Reply]
    duration_s: float
    client: ClientHealth
    counters: Mapping[str, float]  # what the server's own counters rose by
    ran_dry: bool = False  # the manifest ended before `duration_s` did
    forced: bool = True  # the server was asked to keep to the output lengths of the manifest, and did not refuse
    started: str = ""  # ISO 8601

    def summary(self) -> dict[str, Any]:
        """The numbers of `vllm bench serve`, and slo_share, cache_hit_share, acceptance_length where they exist."""
        done = [reply for reply in self.replies if reply.ok]
        input_tokens = sum(reply.input_tokens for reply in done)
        output_tokens = sum(reply.output_tokens for reply in done)
        good = sum(reply.passes(self.load) for reply in done)
        has_slo = any((self.load.slo_ttft_ms, self.load.slo_tpot_ms, self.load.slo_e2el_ms))
        finished = sum(reply.finished for reply in self.replies)
        share = good / finished if has_slo and finished else None
        summary: dict[str, Any] = {
            "duration": self.duration_s,
            "completed": len(done),
            "failed": sum(reply.error is not None for reply in self.replies),
            "unfinished": sum(not reply.finished for reply in self.replies),
            "total_input_tokens": input_tokens,
            "total_output_tokens": output_tokens,
            "request_throughput": len(done) / self.duration_s,
            "request_goodput": good / self.duration_s if has_slo else None,
            "output_throughput": output_tokens / self.duration_s,
            "total_token_throughput": (input_tokens + output_tokens) / self.duration_s,
            "slo_share": share,
            "slo_met": None if share is None else share >= self.load.slo_share,
            "cache_hit_share": self._cache_hit_share(done, input_tokens),
            "acceptance_length": self._acceptance_length(),
        }
        for name, values in self.times().items():
            if not len(values):
                continue
            summary |= {f"mean_{name}_ms": values.mean(), f"median_{name}_ms": np.median(values)}
            summary |= {f"std_{name}_ms": values.std()}
            summary |= {f"p{p}_{name}_ms": np.percentile(values, p) for p in PERCENTILES}
        return {key: float(v) if isinstance(v, np.floating) else v for key, v in summary.items()}

    def times(self) -> dict[str, np.ndarray]:
        """Milliseconds of every completed request: ttft, tpot, itl, e2el."""
        done = [reply for reply in self.replies if reply.ok]
        lists = {
            "ttft": [reply.ttft_ms for reply in done],
            "tpot": [reply.tpot_ms for reply in done if reply.output_tokens > 1],
            "itl": [gap for reply in done for gap in reply.itl_ms],
            "e2el": [reply.e2el_ms for reply in done],
        }
        return {name: np.array(values, dtype=float) for name, values in lists.items()}

    def _cache_hit_share(self, done: Sequence[Reply], input_tokens: int) -> float | None:
        """Cached share of the prompt tokens: as the replies say, else as the server's counters say."""
        if done and all(reply.cached_tokens is not None for reply in done) and input_tokens:
            return sum(reply.cached_tokens or 0 for reply in done) / input_tokens
        queries, hits = self.counters.get("cache_queries"), self.counters.get("cache_hits")
        return hits / queries if queries and hits is not None else None

    def _acceptance_length(self) -> float | None:
        """Tokens per verify step, the bonus token counted."""
        drafts, accepted = self.counters.get("drafts"), self.counters.get("accepted_tokens")
        return 1.0 + accepted / drafts if drafts and accepted is not None else None


def vllm_json(result: LoadResult, *, detailed: bool = False) -> dict[str, Any]:
    """The result as `vllm bench serve --save-result` writes it."""
    load, started = result.load, datetime.fromisoformat(result.started)
    summary = result.summary()
    row = {
        "date": started.strftime("%Y%m%d-%H%M%S"),
        "backend": "openai-chat" if load.endpoint == "chat" else "openai",
        "label": None,
        "model_id": result.model,
        "tokenizer_id": None,
        "num_prompts": len(result.replies),
        "request_rate": load.rate if load.rate is not None else "inf",
        "burstiness": load.burstiness,
        "max_concurrency": load.concurrency,
        **{key: value for key, value in summary.items() if key != "request_goodput"},
        "request_goodput": summary["request_goodput"],
    }
    if detailed:
        row |= {
            "input_lens": [reply.input_tokens for reply in result.replies],
            "output_lens": [reply.output_tokens for reply in result.replies],
            "ttfts": [reply.ttft_ms / 1e3 for reply in result.replies],
            "itls": [[gap / 1e3 for gap in reply.itl_ms] for reply in result.replies],
            "generated_texts": [reply.text for reply in result.replies],
            "errors": [reply.error or "" for reply in result.replies],
        }
    return row


def aiperf_json(result: LoadResult) -> dict[str, Any]:
    """The result as AIPerf's `profile_export_aiperf.json`: metric -> unit, avg, percentiles, min, max, std, count."""
    times, summary = result.times(), result.summary()
    done = [reply for reply in result.replies if reply.ok]
    lengths = {
        "input_sequence_length": np.array([reply.input_tokens for reply in done], dtype=float),
        "output_sequence_length": np.array([reply.output_tokens for reply in done], dtype=float),
    }
    named = {"time_to_first_token": "ttft", "inter_token_latency": "tpot", "request_latency": "e2el"}
    row: dict[str, Any] = {"schema_version": "1.0"}
    row |= {name: _distribution(times[key], "ms") for name, key in named.items() if len(times[key])}
    row["inter_chunk_latency"] = _distribution(times["itl"], "ms") if len(times["itl"]) else None
    row |= {name: _distribution(values, "tokens") for name, values in lengths.items() if len(values)}
    for name, key, unit in (
        ("request_throughput", "request_throughput", "requests/sec"),
        ("output_token_throughput", "output_throughput", "tokens/sec"),
        ("total_token_throughput", "total_token_throughput", "tokens/sec"),
        ("goodput", "request_goodput", "requests/sec"),
        ("request_count", "completed", "requests"),
        ("error_request_count", "failed", "requests"),
        ("total_isl", "total_input_tokens", "tokens"),
        ("total_osl", "total_output_tokens", "tokens"),
        ("benchmark_duration", "duration", "sec"),
    ):
        row[name] = None if summary[key] is None else {"unit": unit, "avg": float(summary[key])}
    errors: dict[str, int] = {}
    for reply in result.replies:
        if reply.error is not None:
            errors[reply.error] = errors.get(reply.error, 0) + 1
    row["error_summary"] = [
        {"error_details": {"code": None, "type": "RequestError", "message": text}, "count": n}
        for text, n in errors.items()
    ]
    loadgen = {"concurrency": result.load.concurrency, "request_rate": result.load.rate}
    row["input_config"] = {
        "endpoint": {"model_names": [result.model], "type": result.load.endpoint, "streaming": True},
        "loadgen": loadgen,
    }
    return row | {"was_cancelled": False, "start_time": result.started}


def _distribution(values: np.ndarray, unit: str) -> dict[str, Any]:
    percentiles = {f"p{p}": float(np.percentile(values, p)) for p in (1, 5, 10, 25, 50, 75, 90, 95, 99)}
    spread = {"min": float(values.min()), "max": float(values.max()), "std": float(values.std())}
    return {"unit": unit, "avg": float(values.mean()), **percentiles, **spread, "count": len(values)}
