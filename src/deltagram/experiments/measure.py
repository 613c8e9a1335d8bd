"""From what a launch left behind to its one number, and the facts that the rules ask about."""

import asyncio
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from deltagram.experiments.load import TIMES, LoadResult, aiperf_json, vllm_json
from deltagram.experiments.plan import Cell, Measure
from deltagram.experiments.records import finite, write_bytes, write_json
from deltagram.experiments.steady import steady_state

QUANTILES = (0, 5, 25, 50, 75, 95, 100)


class Garbage(Exception):
    """What a launch left cannot be read; the text says what and why."""


@dataclass(frozen=True)
class Measured:
    number: float  # the launch's one number; above 0
    facts: Mapping[str, Any] = field(default_factory=dict)
    quantiles: tuple[float, ...] | None = None  # of the steps or requests behind the number, for the report only
    beside: Mapping[str, Any] = field(default_factory=dict)  # printed next to the number

    def row(self) -> dict[str, Any]:
        if not (np.isfinite(self.number) and self.number > 0.0):
            raise Garbage(f"the number is {self.number!r}; a ratio needs one above 0")
        quantiles = list(self.quantiles) if self.quantiles else None
        return {"number": self.number, "facts": dict(self.facts), "quantiles": quantiles, "beside": dict(self.beside)}


def read_trace(file: Path, cell: Cell) -> Measured:
    """The steady median of a step trace: JSON lines with step, ms, kind, tokens, sequences, bucket, and free keys.

    A line with `digest` (the hash of all output tokens) may come first or last; `output_tokens` (of each output),
    `cache_hit_share` and `acceptance_length` beside it are taken along.
    """
    measure, steps, about = cell.measure, list[float](), dict[str, Any]()
    try:
        lines = file.read_text().splitlines()
    except OSError as error:
        raise Garbage(f"no step trace: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if "ms" in row:
                if measure.steps in ("all", row["kind"]):
                    steps.append(float(row["ms"]) / (float(row["tokens"]) if measure.per_token else 1.0))
            else:
                about |= row
        except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
            raise Garbage(f"line {number} of the step trace is {line[:80]!r}: {error!r}") from None
    if not all(np.isfinite(step) and step > 0.0 for step in steps):
        raise Garbage("the step trace has steps that are not above 0 ms")
    try:
        steady = steady_state(np.array(steps), measure.warmup)
    except ValueError as error:
        raise Garbage(
            f"the step trace has {len(lines)} lines and {len(steps)} {measure.steps} steps: {error}"
        ) from None
    facts = {
        "digests": {"all": about["digest"]} if "digest" in about else None,
        "wrong_lengths": _wrong_lengths(about, cell),
        "cache_hit_share": about.get("cache_hit_share"),
        "drift": steady.drift,
        "steps": steady.kept,
    }
    beside = {
        "mean_ms": steady.mean,
        "p95_ms": steady.p95,
        "first_steady_step": steady.first,
        "steps_kept": steady.kept,
    }
    beside |= {key: about[key] for key in ("acceptance_length",) if key in about}
    return Measured(steady.median, facts, _quantiles(np.array(steps[steady.first :])), beside)


def read_command(output: Path, measure: Measure) -> Measured:
    """The number that a command printed: the last match of the regular expression, or a value of its JSON."""
    text = output.read_text(errors="replace")
    facts = {}
    if measure.digest is not None:
        found = re.findall(measure.digest, text)
        if not found:
            raise Garbage(f"no match of the digest {measure.digest!r} in its output, which ends {text[-200:]!r}")
        facts["digests"] = {"all": _group(found[-1])}
    if measure.number_from == "regex":
        found = re.findall(measure.number, text)
        if not found:
            raise Garbage(f"no match of {measure.number!r} in its output, which ends {text[-200:]!r}")
        value: Any = _group(found[-1])
    else:
        value = _json_value(text, measure.number)
    try:
        return Measured(float(value), facts)
    except (TypeError, ValueError):
        raise Garbage(f"{value!r} is no number") from None


def measure_load(ready_url: str, cell: Cell, folder: Path) -> Measured:
    """Runs the load of `cell` against the host of `ready_url`. Raises TimeoutError past the measure's time limit."""
    from deltagram.experiments.client import run_load  # needs aiohttp, which reading plans and results does not

    manifest, load = cell.manifest, cell.measure.load
    assert manifest is not None and load is not None
    parts = urlsplit(ready_url)

    async def run() -> LoadResult:
        async with asyncio.timeout(cell.measure.timeout_s):
            return await run_load(f"{parts.scheme}://{parts.netloc}", manifest, load)

    try:
        result = asyncio.run(run())
    except ConnectionError as error:
        raise Garbage(str(error)) from None
    save_load(result, folder)
    return read_load_result(result, cell.measure)


def read_load_result(result: LoadResult, measure: Measure) -> Measured:
    summary = result.summary()
    number = summary.get(measure.number)
    errors = [reply.error for reply in result.replies if reply.error is not None]
    if number is None:
        raise Garbage(f"the load gave no {measure.number}; {len(errors)} requests failed, first: {errors[:1]}")
    done = [reply for reply in result.replies if reply.ok]
    digests = {f"{reply.session}/{reply.turn}": hashlib.sha256(reply.text.encode()).hexdigest()[:16] for reply in done}
    facts = {
        "digests": digests,
        "wrong_lengths": sum(reply.output_tokens != reply.asked_tokens for reply in done),
        "failed_share": len(errors) / len(result.replies),
        "cache_hit_share": summary["cache_hit_share"],
        "client_late": list(result.client.reasons),
    }
    time_name = next((name for name in TIMES if f"_{name}_" in measure.number), None)
    values = result.times()[time_name] if time_name else np.zeros(0)
    keys = ("completed", "failed", "median_ttft_ms", "median_tpot_ms", "output_throughput", "slo_share")
    beside = {key: summary.get(key) for key in (*keys, "cache_hit_share", "acceptance_length")}
    return Measured(float(number), facts, _quantiles(values) if len(values) else None, beside)


def save_load(result: LoadResult, folder: Path) -> None:
    """Writes requests.jsonl (every request), vllm-bench.json and profile_export_aiperf.json into `folder`."""
    rows = [finite({**vars(reply), "tpot_ms": reply.tpot_ms}) for reply in result.replies]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_bytes(folder / "requests.jsonl", text.encode())
    write_json(folder / "vllm-bench.json", vllm_json(result, detailed=True))
    write_json(folder / "profile_export_aiperf.json", aiperf_json(result))


def _wrong_lengths(about: Mapping[str, Any], cell: Cell) -> int | None:
    """How many outputs of a step trace are not as long as the manifest asks; None where either does not say."""
    if "output_tokens" not in about or cell.manifest is None:
        return None
    asked = sorted(turn.output_tokens for session in cell.manifest.sessions for turn in session.turns)
    got = sorted(about["output_tokens"])
    return abs(len(asked) - len(got)) + sum(a != b for a, b in zip(asked, got, strict=False))


def _quantiles(values: np.ndarray) -> tuple[float, ...]:
    return tuple(float(value) for value in np.percentile(values, QUANTILES))


def _group(match: Any) -> str:
    return match[0] if isinstance(match, tuple) else match


def _json_value(text: str, path: str) -> Any:
    """The value at a dotted path of the JSON in `text`: all of it, or its last line that is an object."""
    candidates = [text, *reversed([line for line in text.splitlines() if line.startswith("{")])]
    for candidate in candidates:
        try:
            value = json.loads(candidate)
        except ValueError:
            continue
        try:
            for key in path.split("."):
                value = value[int(key)] if isinstance(value, list) else value[key]
            return value
        except (KeyError, IndexError, TypeError, ValueError):
            raise Garbage(f"its JSON has no {path!r}: {candidate[:200]}") from None
    raise Garbage(f"its output is no JSON and ends {text[-200:]!r}")
