"""The `load` measure within an experiment: servers that answer, die, hang, answer garbage or hit a cache."""

import json
import os
import signal
import threading

import pytest

from deltagram.experiments.compare import compare
from deltagram.experiments.read_plan import load_plan

PLAN = """
name = "load"
[design]
margin = 0.2
blocks = 2
retries = 0
[arm.A]
command = {a}
ready = {{url = "http://127.0.0.1:{{port}}/health"}}
[arm.B]
command = {b}
ready = {{url = "http://127.0.0.1:{{port}}/health"}}
[measure]
kind = "load"
number = "{number}"
concurrency = 2
max_lag_ms = 500
timeout_s = {timeout_s}
slo = {{ttft_ms = 1000}}
[prompts]
sessions = 4
input_tokens = 8
output_tokens = 6
"""
STUB = ["{python}", "-m", "deltagram.experiments.stub", "--port", "{port}", "--ttft-ms", "20", "--tpot-ms"]
DIES = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b'{"data": [{"id": "m"}]}')
    def do_POST(self):
        os._exit(9) if sys.argv[2] == "dies" else None
        self.send_response(200); self.end_headers(); self.wfile.write(b"<html>hello</html>")
    def log_message(self, *words): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


class Silent:
    def launching(self, what, done, total, left_s): ...

    def launched(self, launch): ...

    def looked(self, blocks, planned, results): ...


def run(folder, a, b=None, number="median_tpot_ms", timeout_s=30, extra=""):
    plan = PLAN.format(a=json.dumps(a), b=json.dumps(b or a), number=number, timeout_s=timeout_s)
    (folder / "plan.toml").write_text(plan + extra)
    return compare(load_plan(folder / "plan.toml"), folder / "records", progress=Silent())


def test_two_servers_and_their_records(tmp_path):
    outcome = run(tmp_path, [*STUB, "20"], [*STUB, "10"])
    cell = outcome.result["cells"]["all"]
    assert cell["verdict"] == "faster" and cell["speedup"] == pytest.approx(1.0, abs=0.25)
    launch = outcome.record.launches()[0]
    # The stub's words are a function of the prompt, so both arms answer alike and the digests agree.
    assert len(launch["facts"]["digests"]) == 4 and launch["facts"]["wrong_lengths"] == 0
    folder = outcome.record.folder / "launches" / launch["folder"]
    assert json.loads((folder / "vllm-bench.json").read_text())["completed"] == 4
    assert json.loads((folder / "profile_export_aiperf.json").read_text())["request_count"]["avg"] == 4
    rows = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
    assert {row["session"] for row in rows} == {"s0", "s1", "s2", "s3"} and all(len(row["itl_ms"]) == 5 for row in rows)
    manifest = (outcome.record.folder / "prompts-all.jsonl").read_text()
    assert len(manifest.splitlines()) == 4


def test_a_throughput_is_better_when_higher(tmp_path):
    outcome = run(tmp_path, [*STUB, "10"], [*STUB, "30"], number="request_goodput")
    assert outcome.result["cells"]["all"]["verdict"] == "slower"


@pytest.mark.parametrize(
    ("command", "timeout_s", "state", "reason"),
    [
        (["{python}", "-c", DIES, "{port}", "dies"], 30, "died", "exit status 9 while it was measured"),
        (["{python}", "-c", DIES, "{port}", "lies"], 30, "garbage", "gave no median_tpot_ms; 4 requests failed"),
        ([*STUB, "9000"], 1, "hung", "the load did not finish within 1 s"),
        (["{python}", "-m", "http.server", "{port}"], 30, "not-ready", "not ready within 2 s"),
    ],
    ids=["died", "garbage", "hung", "not-ready"],
)
def test_a_server_that_fails_ends_in_a_named_state(tmp_path, command, timeout_s, state, reason):
    plan = PLAN.replace('/health"', '/health", timeout_s = 2') if state == "not-ready" else PLAN
    text = plan.format(a=json.dumps(command), b=json.dumps(command), number="median_tpot_ms", timeout_s=timeout_s)
    (tmp_path / "plan.toml").write_text(text)
    outcome = compare(load_plan(tmp_path / "plan.toml"), tmp_path / "records", progress=Silent())
    (launch,) = outcome.record.launches()
    assert launch["state"] == state and reason in launch["reason"]
    assert outcome.result["state"] == "failed"


def test_rules_that_only_a_load_can_break(tmp_path):
    outcome = run(tmp_path, [*STUB, "10"], extra="\n[invalid]\noutput_digest = 'ignore'\n[[cell]]\nname = 'tight'\n"
                  "measure = {max_lag_ms = 0.0001}\n")  # fmt: skip
    (launch,) = outcome.record.launches()
    assert (launch["state"], launch["rule"]) == ("invalid", "client_late") and "event loop" in launch["reason"]


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_stopping_amid_a_load_is_an_interruption(tmp_path, sign):
    threading.Timer(2.0, lambda: os.kill(os.getpid(), sign)).start()
    outcome = run(tmp_path, [*STUB, "900"])
    assert outcome.result["state"] == "interrupted"
    assert [launch["state"] for launch in outcome.record.launches()] == ["interrupted"]
