"""`load` against a server that we did not write: xPyD-sim, an OpenAI-compatible simulator from PyPI for any CPU."""

import sys
from pathlib import Path

from deltagram.experiments.compare import compare
from deltagram.experiments.read_plan import load_plan

PLAN = """
name = "other"
[design]
margin = 0.05
blocks = 2
[arm.A]
label = "12 ms a token"
command = "{sim} serve --host 127.0.0.1 --port {{port}} --prefill-delay-ms 20 --decode-delay-per-token-ms 12"
ready = {{url = "http://127.0.0.1:{{port}}/health"}}
[arm.B]
label = "6 ms a token"
command = "{sim} serve --host 127.0.0.1 --port {{port}} --prefill-delay-ms 20 --decode-delay-per-token-ms 6"
ready = {{url = "http://127.0.0.1:{{port}}/health"}}
[measure]
kind = "load"
number = "median_tpot_ms"
endpoint = "completions"
concurrency = 2
max_lag_ms = 200
timeout_s = 60
[prompts]
sessions = 4
turns = 2
input_tokens = 20
output_tokens = 25
[invalid]
output_digest = "ignore"
"""


class Silent:
    def launching(self, what, done, total, left_s): ...

    def launched(self, launch): ...

    def looked(self, blocks, planned, results): ...


def test_load_works_against_it_unchanged(tmp_path):
    sim = Path(sys.executable).with_name("xpyd-sim")
    assert sim.exists(), "xpyd-sim is a development dependency"
    (tmp_path / "plan.toml").write_text(PLAN.format(sim=sim))
    outcome = compare(load_plan(tmp_path / "plan.toml"), tmp_path / "records", progress=Silent())
    assert outcome.result["state"] == "done", outcome.result["reason"]
    cell = outcome.result["cells"]["all"]
    assert cell["verdict"] == "faster" and cell["speedup"] > 0.4
    launches = outcome.record.launches()
    assert len(launches) == 8 and all(launch["beside"]["completed"] == 8 for launch in launches)
    for launch in launches:
        folder = outcome.record.folder / "launches" / launch["folder"]
        assert {"requests.jsonl", "vllm-bench.json", "profile_export_aiperf.json"} <= {f.name for f in folder.iterdir()}
