"""The load generator against servers whose behaviour is known to the millisecond, or to the byte."""

import asyncio
import json
import math
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
from aiohttp import web

from deltagram.experiments.client import run_load, self_test
from deltagram.experiments.load import ClientHealth, Load, LoadResult, Reply, aiperf_json, vllm_json
from deltagram.experiments.stub import stub_server
from deltagram.experiments.workload import Manifest, Session, Turn, synthetic


@contextmanager
def server(handler, metrics=None):
    """An aiohttp server in a thread: `handler(body, n)` gives (status, lines of the event stream) for request n."""
    seen, started, ended = [], threading.Event(), threading.Event()
    address = {}

    async def answer(request):
        body = await request.json()
        seen.append(body)
        status, lines = handler(body, len(seen) - 1)
        response = web.StreamResponse(status=status, headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for line in lines:
            await response.write(line.encode())
            await asyncio.sleep(0.002)
        return response

    async def models(_):
        return web.json_response({"data": [{"id": "tiny"}]})

    async def counters(_):
        return web.Response(text=metrics(len(seen)) if metrics else "", status=200 if metrics else 404)

    async def main():
        app = web.Application()
        app.router.add_post("/v1/chat/completions", answer)
        app.router.add_post("/v1/completions", answer)
        app.router.add_get("/v1/models", models)
        app.router.add_get("/metrics", counters)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        address["url"] = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        started.set()
        while not ended.is_set():
            await asyncio.sleep(0.01)
        await runner.cleanup()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    assert started.wait(10)
    try:
        yield address["url"], seen
    finally:
        ended.set()
        thread.join()


def said(*pieces, usage=None, done=True):
    """Lines of a chat stream."""
    lines = [f"data: {json.dumps({'choices': [{'delta': {'content': piece}}]})}\n\n" for piece in pieces]
    if usage is not None:
        lines.append(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n")
    return [*lines, "data: [DONE]\n\n"] if done else lines


def load(url, manifest, **how):
    return asyncio.run(run_load(url, manifest, Load(**how)))


def test_times_are_those_of_the_server():
    manifest = synthetic(sessions=6, turns=2, input_tokens=20, output_tokens=21, delay_s=0.05)
    with stub_server(ttft_ms=60, tpot_ms=10) as url:
        result = load(url, manifest, concurrency=3, slo_ttft_ms=200, slo_tpot_ms=20)
    summary = result.summary()
    assert (summary["completed"], summary["failed"], summary["total_output_tokens"]) == (12, 0, 252)
    assert summary["median_ttft_ms"] == pytest.approx(60, abs=15)
    assert summary["median_tpot_ms"] == pytest.approx(10, abs=1.5)
    assert summary["mean_e2el_ms"] == pytest.approx(260, abs=40)
    # Two rounds of three sessions, each two turns of 260 ms and a gap of 50 ms.
    assert result.duration_s == pytest.approx(1.14, abs=0.3)
    assert summary["slo_share"] == 1.0 and summary["slo_met"]
    assert summary["request_goodput"] == pytest.approx(12 / result.duration_s)
    assert summary["request_throughput"] == summary["request_goodput"]


def test_an_objective_that_is_missed_is_no_goodput():
    manifest = synthetic(sessions=4, input_tokens=5, output_tokens=5)
    with stub_server(ttft_ms=40, tpot_ms=5) as url:
        summary = load(url, manifest, concurrency=4, slo_ttft_ms=20).summary()
    assert (summary["slo_share"], summary["slo_met"], summary["request_goodput"]) == (0.0, False, 0.0)
    assert summary["request_throughput"] > 0


def test_a_turn_carries_all_that_was_said_before():
    manifest = Manifest((Session("s", (Turn("one", 2), Turn("two", 3), Turn("three", 1))),))
    with server(lambda body, n: (200, said(f"r{n}", "!"))) as (url, seen):
        load(url, manifest, concurrency=1, temperature=0.5, extra={"top_k": 5})
        assert [message["content"] for message in seen[2]["messages"]] == ["one", "r0!", "two", "r1!", "three"]
        assert [message["role"] for message in seen[1]["messages"]] == ["user", "assistant", "user"]
        for body, tokens in zip(seen, (2, 3, 1), strict=True):
            assert body["max_tokens"] == body["min_tokens"] == tokens and body["ignore_eos"] is True
            assert (body["model"], body["temperature"], body["top_k"], body["stream"]) == ("tiny", 0.5, 5, True)
        seen.clear()
        load(
            url,
            Manifest((Session("s", (Turn("one", 2), Turn("two", 3))),)),
            endpoint="completions",
            force_lengths=False,
        )
        assert seen[1]["prompt"] == "one\nr0!\ntwo"
        assert "ignore_eos" not in seen[0] and "min_tokens" not in seen[0]


def test_closed_arrivals_hold_the_number_of_sessions():
    manifest = synthetic(sessions=9, input_tokens=5, output_tokens=10)
    with stub_server(ttft_ms=30, tpot_ms=5) as url:
        result = load(url, manifest, concurrency=3)
    edges = sorted(
        [(reply.sent_s, 1) for reply in result.replies]
        + [(reply.sent_s + reply.e2el_ms / 1e3, -1) for reply in result.replies]
    )
    assert max(np.cumsum([step for _, step in edges])) == 3
    assert [reply.session for reply in result.replies][:3] == ["s0", "s1", "s2"]


def test_poisson_arrivals_are_a_function_of_the_seed_and_capped():
    manifest = synthetic(sessions=40, input_tokens=5, output_tokens=2)
    with stub_server(ttft_ms=20, tpot_ms=1) as url:
        first, again = (load(url, manifest, arrivals="poisson", rate=80.0, concurrency=None, seed=3) for _ in range(2))
        capped = load(url, manifest, arrivals="poisson", rate=500.0, concurrency=2, seed=3)
    planned = [reply.planned_s for reply in first.replies]
    gaps = np.random.default_rng(3).gamma(1.0, 1 / 80.0, 40)
    assert planned == pytest.approx(np.cumsum(gaps).tolist())
    assert planned == [reply.planned_s for reply in again.replies]
    assert all(reply.sent_s >= reply.planned_s for reply in first.replies)
    # 40 requests of 21 ms, two at a time; waiting for a place is the plan and makes nobody late.
    assert capped.duration_s > 0.4 and capped.client.p99_late_ms < 50


def test_a_trace_is_replayed_at_its_times():
    manifest = Manifest(tuple(Session(f"s{i}", (Turn("x", 1),), start) for i, start in enumerate((10.0, 10.15, 10.05))))
    with stub_server(ttft_ms=5, tpot_ms=1) as url:
        result = load(url, manifest, arrivals="trace", concurrency=None)
    sent = {reply.session: reply.sent_s for reply in result.replies}
    assert (
        sent["s0"] < 0.05
        and sent["s2"] == pytest.approx(0.05, abs=0.04)
        and sent["s1"] == pytest.approx(0.15, abs=0.04)
    )


def test_a_duration_ends_the_run_and_what_is_in_flight_is_unfinished():
    with stub_server(ttft_ms=30, tpot_ms=10) as url:
        result = load(url, synthetic(sessions=99, input_tokens=3, output_tokens=10), concurrency=2, duration_s=0.5)
        dry = load(url, synthetic(sessions=2, input_tokens=3, output_tokens=3), concurrency=2, duration_s=9.0)
    summary = result.summary()
    assert result.duration_s == pytest.approx(0.5, abs=0.1) and not result.ran_dry
    assert summary["unfinished"] == 2 and summary["failed"] == 0 and summary["completed"] >= 4
    assert dry.ran_dry and dry.duration_s < 2


def test_every_kind_of_failure_is_an_error_of_its_request_and_ends_its_session():
    kinds = [
        (503, ["busy"]),
        (200, ["data: {not json\n\n"]),
        (200, said("half", done=False)),
        (200, said()),
        (200, ["data: " + json.dumps({"error": {"message": "no memory"}}) + "\n\n"]),
        (200, ["data: " + json.dumps({"choices": 3}) + "\n\n"]),
    ]
    manifest = Manifest(tuple(Session(f"s{i}", (Turn("x", 1), Turn("y", 1))) for i in range(len(kinds) + 1)))
    with server(lambda body, n: kinds[n] if n < len(kinds) else (200, said("fine"))) as (url, seen):
        result = load(url, manifest, concurrency=1)
        assert len(seen) == len(kinds) + 2  # a failed turn has no next one
    errors = [reply.error for reply in result.replies]
    for error, part in zip(
        errors,
        ("HTTP 503: busy", "JSONDecodeError", "before the reply did", "no text", "no memory", "TypeError"),
        strict=False,
    ):
        assert part in error
    summary = result.summary()
    assert (summary["failed"], summary["completed"], summary["unfinished"]) == (len(kinds), 2, 0)
    assert errors[-2:] == [None, None]


def test_a_server_that_is_not_there_or_lists_no_models_is_a_connection_error():
    with pytest.raises(ConnectionError, match="does not list its models"):
        load("http://127.0.0.1:9", synthetic(sessions=1, input_tokens=1, output_tokens=1), concurrency=1)
    result = load(
        "http://127.0.0.1:9", synthetic(sessions=1, input_tokens=1, output_tokens=1), concurrency=1, model="m"
    )
    assert result.summary()["failed"] == 1 and "ClientConnectorError" in result.replies[0].error


def test_counters_and_usage_are_taken_where_the_server_gives_them():
    def metrics(n):
        return (
            "# HELP x y\n"
            f'vllm:prefix_cache_queries_total{{engine="0",model_name="a b"}} {100.0 + 10 * n}\n'
            f'vllm:prefix_cache_hits_total{{engine="0"}} {50.0 + 4 * n}\n'
            f"vllm:spec_decode_num_drafts_total {7 + 2 * n}\n"
            f"vllm:spec_decode_num_accepted_tokens_total {1 + 3 * n}\n"
        )

    usage = {"prompt_tokens": 10, "completion_tokens": 2}
    manifest = synthetic(sessions=3, input_tokens=5, output_tokens=2)
    with server(lambda body, n: (200, said("a", "b", usage=usage)), metrics) as (url, _):
        summary = load(url, manifest, concurrency=1).summary()
    assert summary["cache_hit_share"] == pytest.approx(0.4)
    assert summary["acceptance_length"] == pytest.approx(2.5)
    assert (summary["total_input_tokens"], summary["total_output_tokens"]) == (30, 6)
    usage = {**usage, "prompt_tokens_details": {"cached_tokens": 8}}
    with server(lambda body, n: (200, said("a", "b", usage=usage))) as (url, _):
        assert load(url, manifest, concurrency=1).summary()["cache_hit_share"] == pytest.approx(0.8)


def test_a_client_that_cannot_keep_up_says_so():
    manifest = synthetic(sessions=4, input_tokens=5, output_tokens=30)

    def stall(_):
        time.sleep(0.06)

    with stub_server(ttft_ms=10, tpot_ms=2) as url:
        result = asyncio.run(run_load(url, manifest, Load(concurrency=1), progress=stall))
        assert result.client.reasons and "event loop" in result.client.reasons[0]
        assert load(url, manifest, concurrency=2, max_lag_ms=200.0).client.reasons == ()


def test_the_self_test_tells_a_client_that_adds_time():
    manifest = synthetic(sessions=50, input_tokens=5, output_tokens=20)
    assert asyncio.run(self_test(Load(concurrency=2, max_lag_ms=200.0), manifest, 30.0, 10.0, seconds=1.0)) == []
    many = synthetic(sessions=200, input_tokens=5, output_tokens=100)
    reasons = asyncio.run(self_test(Load(concurrency=100), many, 1.0, 0.2, seconds=1.0))
    assert reasons  # 100 streams of 5,000 tokens a second each are more than one event loop can read


def made_result():
    load = Load(concurrency=2, slo_ttft_ms=150.0)
    replies = [
        Reply("a", 0, 0.0, 0.0, 3, 100.0, 140.0, [20.0, 20.0], 10, 3, None, "x y z", "length"),
        Reply("b", 0, 0.0, 0.0, 3, 200.0, 260.0, [30.0, 30.0], 12, 3, None, "p q r", "length"),
        Reply("c", 0, 0.0, 0.0, 3, error="HTTP 500: no"),
        Reply("d", 0, 0.0, 0.0, 3, finished=False),
    ]
    return LoadResult(
        load, "tiny", replies, 2.0, ClientHealth(1.0, 1.0, 0.1, ()), {}, started="2026-01-02T03:04:05+00:00"
    )


def test_the_summary_by_hand():
    summary = made_result().summary()
    expected = {
        "completed": 2, "failed": 1, "unfinished": 1, "total_input_tokens": 22, "total_output_tokens": 6,
        "request_throughput": 1.0, "output_throughput": 3.0, "total_token_throughput": 14.0, "request_goodput": 0.5,
        "slo_share": 1 / 3, "slo_met": False, "mean_ttft_ms": 150.0, "median_tpot_ms": 25.0, "std_ttft_ms": 50.0,
        "p99_itl_ms": 30.0, "mean_e2el_ms": 200.0, "p90_ttft_ms": 190.0,
    }  # fmt: skip
    for key, value in expected.items():
        assert summary[key] == pytest.approx(value), key
    assert math.isnan(made_result().replies[3].ttft_ms)


def test_the_exports_have_the_keys_that_others_read():
    row = vllm_json(made_result(), detailed=True)
    for key in (
        "date", "backend", "model_id", "num_prompts", "request_rate", "burstiness", "max_concurrency", "duration",
        "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput", "request_goodput",
        "output_throughput", "total_token_throughput",
        *(f"{stat}_{name}_ms" for stat in ("mean", "median", "std", "p99") for name in ("ttft", "tpot", "itl", "e2el")),
    ):  # fmt: skip
        assert key in row, key
    assert (row["date"], row["backend"], row["request_rate"]) == ("20260102-030405", "openai-chat", "inf")
    assert row["itls"][0] == [0.02, 0.02] and row["errors"][2] == "HTTP 500: no" and len(row["ttfts"]) == 4
    row = aiperf_json(made_result())
    assert row["time_to_first_token"] == pytest.approx(
        {"unit": "ms", "avg": 150.0, "p1": 101.0, "p5": 105.0, "p10": 110.0, "p25": 125.0, "p50": 150.0, "p75": 175.0,
         "p90": 190.0, "p95": 195.0, "p99": 199.0, "min": 100.0, "max": 200.0, "std": 50.0, "count": 2}
    )  # fmt: skip
    assert row["output_token_throughput"] == {"unit": "tokens/sec", "avg": 3.0}
    assert row["inter_token_latency"]["avg"] == 25.0 and row["request_count"]["avg"] == 2.0
    assert row["error_summary"][0]["error_details"]["message"] == "HTTP 500: no"


def test_a_server_that_refuses_to_force_lengths_is_asked_without():
    def strict(body, n):
        return (
            (422, ["Unexpected fields: {'ignore_eos', 'min_tokens'}"]) if "ignore_eos" in body else (200, said("fine"))
        )

    with server(strict) as (url, seen):
        result = load(url, synthetic(sessions=3, input_tokens=2, output_tokens=4), concurrency=1)
        assert [("ignore_eos" in body) for body in seen] == [True, False, False, False]
    assert result.summary()["completed"] == 3 and not result.forced
    with server(lambda body, n: (422, ["no"])) as (url, seen):
        result = load(url, synthetic(sessions=1, input_tokens=2, output_tokens=4), concurrency=1)
    assert len(seen) == 1 and result.forced and result.replies[0].error == "ValueError: HTTP 422: no"


def test_a_finish_reason_ends_a_reply_as_well_as_done():
    last = "data: " + json.dumps({"choices": [{"delta": {}, "finish_reason": "length"}]}) + "\n\n"
    with server(lambda body, n: (200, [*said("fine", done=False), last])) as (url, _):
        result = load(url, synthetic(sessions=1, input_tokens=2, output_tokens=4), concurrency=1)
    assert result.replies[0].ok and result.replies[0].finish_reason == "length"
