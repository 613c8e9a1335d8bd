"""The load generator: replays the sessions of a manifest against an OpenAI-compatible server and times what comes back.

A session is one user or agent: its turns run one after another, each with all that was said before as context, after
a gap of `delay_s` (a tool at work). Failing ends the session. The client watches itself while it runs, since a client
that cannot keep up measures itself; `self_test` replays the same load against a stub that is known to be on time.
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime
from itertools import islice
from typing import Any

import aiohttp
import numpy as np

from deltagram.experiments.load import ClientHealth, Load, LoadResult, Reply
from deltagram.experiments.stub import stub_server
from deltagram.experiments.workload import Manifest, Session

LAG_PERIOD_S = 0.005
MAX_LATE_MS = 100.0
MAX_CPU_SHARE = 0.9
FORCING = ("min_tokens", "ignore_eos")

# What servers call the same thing in their Prometheus metrics.
COUNTERS = {
    "cache_queries": ("vllm:prefix_cache_queries_total", "sglang:prompt_tokens_total"),
    "cache_hits": ("vllm:prefix_cache_hits_total", "sglang:cached_tokens_total"),
    "drafts": ("vllm:spec_decode_num_drafts_total",),
    "accepted_tokens": ("vllm:spec_decode_num_accepted_tokens_total",),
}


async def run_load(
    url: str,
    manifest: Manifest,
    load: Load,
    *,
    api_key: str | None = None,
    progress: Callable[[int], None] | None = None,
) -> LoadResult:
    """Replay `manifest` against the server at `url` (scheme, host and port). `progress` gets the replies so far.

    Raises ConnectionError when the server cannot be asked for its models.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=load.request_timeout_s)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout, headers=headers) as http:
        model = load.model or await _first_model(http)
        before = await read_counters(http)
        run = _Run(http, replace(load, model=model), progress)
        started = datetime.now().astimezone().isoformat(timespec="seconds")
        duration_s, ran_dry, client = await run.replay(manifest)
        after = await read_counters(http)
    risen = {name: after[name] - value for name, value in before.items() if name in after}
    return LoadResult(load, model, run.replies, duration_s, client, risen, ran_dry, run.forces, started)


class _Run:
    def __init__(self, http: aiohttp.ClientSession, load: Load, progress: Callable[[int], None] | None) -> None:
        self.http, self.load, self.progress = http, load, progress
        self.replies: list[Reply] = []
        self.start = 0.0
        self.forces = load.force_lengths
        # Closed arrivals are capped by their workers; the others by this.
        self.room = asyncio.Semaphore(load.concurrency if load.concurrency and load.arrivals != "closed" else 1 << 30)

    async def replay(self, manifest: Manifest) -> tuple[float, bool, ClientHealth]:
        """Until all is answered or `duration_s` is over: (seconds, whether sessions ran out, the client's health)."""
        load, lags = self.load, list[float]()
        watch = asyncio.create_task(_watch_lag(lags))
        self.start, cpu = time.perf_counter(), time.process_time()
        try:
            async with asyncio.timeout(load.duration_s):
                if load.arrivals == "closed":
                    waiting = iter(manifest.sessions)
                    workers = (self._worker(waiting) for _ in range(load.concurrency or 1))
                    await asyncio.gather(*workers)
                else:
                    await self._open(manifest)
            ran_dry = load.duration_s is not None
        except TimeoutError:
            ran_dry = False
        finally:
            watch.cancel()
        seconds = time.perf_counter() - self.start
        return seconds, ran_dry, self._health(lags, (time.process_time() - cpu) / seconds)

    async def _worker(self, waiting: Iterator[Session]) -> None:
        for session in waiting:
            await self._session(session, time.perf_counter() - self.start)

    async def _open(self, manifest: Manifest) -> None:
        load = self.load
        if load.arrivals == "poisson":
            assert load.rate is not None
            gaps = np.random.default_rng(load.seed).gamma(
                load.burstiness, 1.0 / (load.rate * load.burstiness), len(manifest.sessions)
            )
            arrivals = np.cumsum(gaps).tolist()
        else:
            starts = [session.start_s or 0.0 for session in manifest.sessions]
            arrivals = [start - min(starts) for start in starts]
        async with asyncio.TaskGroup() as tasks:
            for planned_s, session in sorted(zip(arrivals, manifest.sessions, strict=True), key=lambda pair: pair[0]):
                await asyncio.sleep(max(0.0, planned_s - (time.perf_counter() - self.start)))
                tasks.create_task(self._session(session, planned_s))

    async def _session(self, session: Session, planned_s: float) -> None:
        said: list[tuple[str, str]] = []
        for index, turn in enumerate(session.turns):
            if index:
                planned_s = time.perf_counter() - self.start + turn.delay_s
            await asyncio.sleep(max(0.0, planned_s - (time.perf_counter() - self.start)))
            said.append(("user", turn.text))
            reply = Reply(session.name, index, planned_s, 0.0, turn.output_tokens, finished=False)
            waited = self.room.locked()
            async with self.room:
                reply.sent_s = time.perf_counter() - self.start
                if waited:  # for a place, which is the plan and not the client
                    reply.planned_s = reply.sent_s
                self.replies.append(reply)
                await self._send(reply, said)
            if self.progress:
                self.progress(len(self.replies))
            if not reply.ok:
                return
            said.append(("assistant", reply.text))

    def _body(self, said: list[tuple[str, str]], output_tokens: int) -> bytes:
        load = self.load
        body: dict[str, Any] = {"model": load.model, "stream": True, "stream_options": {"include_usage": True}}
        body |= {"temperature": load.temperature, "max_tokens": output_tokens}
        if self.forces:
            body |= {"min_tokens": output_tokens, "ignore_eos": True}
        if load.endpoint == "chat":
            body["messages"] = [{"role": role, "content": text} for role, text in said]
        else:
            body["prompt"] = "\n".join(text for _, text in said)
        return json.dumps(body | dict(load.extra)).encode()

    async def _send(self, reply: Reply, said: list[tuple[str, str]]) -> None:
        path = "/v1/chat/completions" if self.load.endpoint == "chat" else "/v1/completions"
        body, forced = self._body(said, reply.asked_tokens), self.forces
        sent = last = time.perf_counter()
        pieces: list[str] = []
        try:
            async with self.http.post(path, data=body, headers={"Content-Type": "application/json"}) as response:
                if response.status != 200:
                    why = await response.text()
                    if forced and response.status in (400, 422) and any(key in why for key in FORCING):
                        self.forces = False  # strict servers refuse the keys; the results say that lengths are theirs
                        return await self._send(reply, said)
                    raise ValueError(f"HTTP {response.status}: {why[:200]}")
                async for event in _events(response.content):
                    now = time.perf_counter()
                    if event == b"[DONE]":
                        reply.finish_reason = reply.finish_reason or "done"
                        break
                    text = _read_event(json.loads(event), reply)
                    if not text:
                        continue
                    if pieces:
                        reply.itl_ms.append((now - last) * 1e3)
                    else:
                        reply.ttft_ms = (now - sent) * 1e3
                    pieces.append(text)
                    last = now
            if not pieces:
                reply.error = "the reply held no text"
            elif reply.finish_reason is None:
                reply.error = "the stream ended before the reply did"
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
            reply.error = f"{type(error).__name__}: {error}"[:200]
        finally:
            reply.e2el_ms = (last - sent) * 1e3
            reply.text = "".join(pieces)
            reply.output_tokens = reply.output_tokens or len(pieces)
        reply.finished = True

    def _health(self, lags: list[float], cpu_share: float) -> ClientHealth:
        lag = float(np.percentile(lags, 99)) if lags else 0.0
        lates = [(reply.sent_s - reply.planned_s) * 1e3 for reply in self.replies]
        late = float(np.percentile(lates, 99)) if lates else 0.0
        reasons = []
        if lag > self.load.max_lag_ms:
            reasons.append(f"its event loop woke {lag:.0f} ms late (p99; limit {self.load.max_lag_ms:g} ms)")
        if late > MAX_LATE_MS:
            reasons.append(f"it sent {late:.0f} ms late (p99; limit {MAX_LATE_MS:g} ms)")
        if cpu_share > MAX_CPU_SHARE:
            reasons.append(f"it used {cpu_share:.0%} of a core (limit {MAX_CPU_SHARE:.0%})")
        return ClientHealth(lag, late, cpu_share, tuple(reasons))


async def self_test(load: Load, manifest: Manifest, ttft_ms: float, tpot_ms: float, seconds: float = 5.0) -> list[str]:
    """Could this client have seen a faster server? Replays the load for `seconds` against a stub that answers exactly
    after `ttft_ms` and then every `tpot_ms`; reasons why not, or []. The stub runs in a process of its own."""
    with stub_server(ttft_ms=ttft_ms, tpot_ms=tpot_ms) as url:
        short = replace(load, duration_s=seconds, model="stub")
        result = await run_load(url, manifest, short)
    done = [reply for reply in result.replies if reply.ok]
    reasons = list(result.client.reasons)
    for name, given, seen in (
        ("TTFT", ttft_ms, [reply.ttft_ms for reply in done]),
        ("TPOT", tpot_ms, [reply.tpot_ms for reply in done if reply.output_tokens > 1]),
    ):
        if seen and float(np.median(seen)) > 1.1 * given + 2.0:
            reasons.append(f"a stub with {name} {given:.1f} ms was measured at {np.median(seen):.1f} ms")
    if not done:
        reasons.append(f"no request against the stub finished within {seconds:g} s")
    return reasons


async def read_counters(http: aiohttp.ClientSession) -> dict[str, float]:
    """The server's cache and speculation counters under our names; {} when it has no /metrics."""
    try:
        async with http.get("/metrics") as response:
            text = await response.text() if response.status == 200 else ""
    except (aiohttp.ClientError, TimeoutError):
        return {}
    sums: dict[str, float] = {}
    for line in text.splitlines():
        name = line.split("{")[0].split(" ")[0]
        for ours, theirs in COUNTERS.items():
            if name in theirs:
                sums[ours] = sums.get(ours, 0.0) + float(line.rsplit(maxsplit=1)[1])
    return sums


async def _first_model(http: aiohttp.ClientSession) -> str:
    try:
        async with http.get("/v1/models") as response:
            return str((await response.json(content_type=None))["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ConnectionError(f"the server does not list its models ({error!r}); name one") from error


async def _events(stream: aiohttp.StreamReader) -> Any:
    """The data of server-sent events, as they arrive."""
    left = b""
    async for chunk in stream.iter_any():
        lines = (left + chunk).split(b"\n")
        left = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _read_event(event: Any, reply: Reply) -> str:
    """The text of one event; the usage, where it comes along, goes to the reply."""
    if "error" in event:
        raise ValueError(f"the server said {event['error']!r}")
    usage = event.get("usage")
    if usage:
        reply.input_tokens, reply.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        details = usage.get("prompt_tokens_details") or {}
        reply.cached_tokens = details.get("cached_tokens", reply.cached_tokens)
    for choice in islice(event["choices"], 1):
        reply.finish_reason = choice.get("finish_reason") or reply.finish_reason
        delta = choice.get("delta")
        if delta is None:
            return str(choice.get("text") or "")
        return str(delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or "")
    return ""


async def _watch_lag(lags: list[float]) -> None:
    while True:
        before = time.perf_counter()
        await asyncio.sleep(LAG_PERIOD_S)
        lags.append((time.perf_counter() - before - LAG_PERIOD_S) * 1e3)
