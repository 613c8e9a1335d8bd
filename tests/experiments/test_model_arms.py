"""Arms that are a deltagram model: one real launch of the shipped model under each measure that takes one."""

import json
import sys

from deltagram.experiments.arms import arm_command
from deltagram.experiments.launch import run_launch
from deltagram.experiments.read_plan import parse_plan

PLAN = """
name = "model"
[design]
margin = 0.05
blocks = 2
[arm.A]
model = "demo"
settings = {{device = "cpu", dtype = "float32", max_num_tokens = 128}}
[arm.B]
model = "nowhere/else"
settings = {{max_num_tokens = "{{size}}"}}
[measure]
{measure}
[prompts]
sessions = 2
turns = 2
input_tokens = 12
output_tokens = 24
[[cell]]
name = "one"
set = {{size = 256}}
"""
LOAD = "kind = 'load'\nconcurrency = 2\nmax_lag_ms = 1000\ntimeout_s = 120"


def launch(tmp_path, arm, measure):
    """One launch: (what came of it, its folder)."""
    plan = parse_plan(PLAN.format(measure=measure), tmp_path)
    prompts, folder = tmp_path / "prompts.jsonl", tmp_path / "launch"
    prompts.write_text(plan.cells[0].manifest.lines())
    folder.mkdir()
    outcome = run_launch(plan.arms[arm], plan.cells[0], folder, prompts, None)
    assert outcome["state"] == "ok", outcome["reason"]
    return outcome, folder


def test_steps_of_the_shipped_model(tmp_path):
    outcome, folder = launch(tmp_path, "A", "kind = 'step'")
    rows = [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]
    decode = [row for row in rows if row.get("kind") == "decode"]
    # Two turns of 24 forced tokens, the first of each from a prefill step, both sessions in one step.
    assert len(decode) == 46 and all(row["tokens"] == row["sequences"] == 2 for row in decode)
    assert rows[-1]["output_tokens"] == [24] * 4 and len(rows[-1]["digest"]) == 64
    assert outcome["facts"]["wrong_lengths"] == 0 and 0.1 < outcome["number"] < 1000


def test_the_shipped_model_served_under_load(tmp_path):
    outcome, folder = launch(tmp_path, "A", LOAD)
    assert outcome["beside"]["completed"] == 4 and outcome["facts"]["wrong_lengths"] == 0
    assert 0.1 < outcome["number"] < 1000
    assert json.loads((folder / "vllm-bench.json").read_text())["total_output_tokens"] == 96


def test_the_command_of_a_served_model(tmp_path):
    plan = parse_plan(PLAN.format(measure=LOAD), tmp_path)
    values = {**plan.cells[0].values, "port": "4321", "prompts": "p", "trace": "t"}
    command, ready = arm_command(plan.arms["B"], plan.cells[0], tmp_path, values)
    assert command[0] == sys.executable and command[3:] == [
        "serve", "--port", "4321", "nowhere/else", "--set", "max_num_tokens=256"
    ]  # fmt: skip
    assert ready == "http://127.0.0.1:4321/health"
    command, _ = arm_command(plan.arms["A"], plan.cells[0], tmp_path, values)
    assert command[3:] == [
        "serve", "--port", "4321", "--device", "cpu", "--dtype", "float32", "--set", "max_num_tokens=128"
    ]  # fmt: skip
