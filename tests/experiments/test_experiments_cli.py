"""The commands: what they print, and how they end."""

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from deltagram.experiments import paired_tests
from deltagram.experiments.cli import app
from deltagram.experiments.stub import stub_server

runner = CliRunner()


@pytest.fixture
def tables(tmp_path):
    """The same blocks in the long and the wide form: cell `fast` is faster, `even` is not."""
    rng = np.random.default_rng(2)
    cells = {
        name: [(rng.normal(10, 0.05, 2), rng.normal(10 / factor, 0.05, 2)) for _ in range(6)]
        for name, factor in (("fast", 1.05), ("even", 1.0))
    }
    with open(tmp_path / "long.csv", "w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["cell", "block", "arm", "value"])
        for name, blocks in cells.items():
            for index, (a, b) in enumerate(blocks):
                out.writerows([name, index, arm, value] for arm, values in (("A", a), ("B", b)) for value in values)
    with open(tmp_path / "wide.csv", "w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["B", "A", "cell"])
        out.writerows(
            [np.exp(np.log(b).mean()), np.exp(np.log(a).mean()), name] for name, bs in cells.items() for a, b in bs
        )
    return tmp_path, cells


@pytest.mark.parametrize("form", ["long", "wide"])
def test_the_numbers_of_others(tables, form):
    folder, cells = tables
    result = runner.invoke(app, ["compare", "--from", str(folder / f"{form}.csv"), "--margin", "0.02", "--json"])
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)["cells"]
    expected = paired_tests(cells, 0.02)
    for name in cells:
        assert said[name]["verdict"] == expected[name].verdict
        assert said[name]["interval"] == pytest.approx(list(expected[name].interval))
    assert (said["fast"]["verdict"], said["even"]["verdict"]) == ("faster", "equivalent")
    text = runner.invoke(app, ["compare", "--from", str(folder / f"{form}.csv"), "--margin", "0.001"]).stdout
    assert re.search(r"fast +faster", text) and "even: unresolved, resolution ±" in text and "blocks would show" in text


def test_bad_tables_name_every_problem(tmp_path):
    file = tmp_path / "bad.csv"
    for content, problems in {
        "x,y\n1,2\n": ["has the columns x, y"],
        "block,arm,value\n1,A,3\n1,C,3\n1,B,fast\n2,A,1\n": [
            "line 3: arm is 'C'",
            "line 4: value is 'fast'",
            "has 1 of A and 0 of B",
        ],
        "A,B\n": ["holds no rows"],
        "A,B\n1,-2\n2,2\n": ["expected (A, B), all numbers finite and above 0"],
    }.items():
        file.write_text(content)
        result = runner.invoke(app, ["compare", "--from", str(file), "--margin", "0.01"])
        assert result.exit_code == 2
        for problem in problems:
            assert problem in result.stderr, result.output


def test_what_cannot_be_done_is_said(tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text("name = 3")
    for words, problem in (
        (["compare"], "nothing to compare"),
        (["compare", "--from", "x.csv"], "--from needs --margin"),
        (["compare", "--from", "x.csv", "--margin", "0.1"], "cannot read x.csv"),
        (["compare", str(plan), "--from", "x.csv"], "it takes no plan"),
        (["compare", str(plan)], "name is 3; expected"),
        (["compare", str(tmp_path / "none.toml")], "cannot read the plan"),
        (["bench", "serve", "--rate", "3", "--arrivals", "closed", "--sessions", "2"], "rate is 3.0"),
        (["bench", "serve", "--extra-body", "{"], "extra-body is '{'"),
        (["bench", "serve", "--prompts", str(tmp_path / "none.jsonl")], "No such file"),
        (["bench", "serve", "--endpoint", "video"], "endpoint is 'video'"),
        (["bench", "serve", "--sessions", "0", "--turns", "-1"], "sessions is 0; expected an integer from 1 up"),
    ):
        result = runner.invoke(app, words)
        assert result.exit_code == 2 and problem in result.stderr, (words, result.output)


def test_a_comparison_from_the_command_line(make_plan, tmp_path_factory, monkeypatch):
    plan = make_plan("write(10.0)", "write(8.0)")
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    out = ["--out", "records"]
    done = runner.invoke(app, ["compare", str(plan), *out])
    assert done.exit_code == 0, done.output
    assert "B is 25.0 % faster" in done.stdout and "left at most" in done.stderr and "look at 3 blocks" in done.stderr
    as_json = runner.invoke(app, ["compare", str(plan), *out, "--json"])
    assert json.loads(as_json.stdout)["cells"]["all"]["verdict"] == "faster"
    aa = runner.invoke(app, ["compare", str(plan), *out, "--aa"])
    assert aa.exit_code == 0 and "A/A: no difference, as it should be" in aa.stdout
    again = runner.invoke(app, ["compare", str(plan), *out, "--resume"])
    assert again.exit_code == 2 and "is done" in again.stderr
    failed = runner.invoke(app, ["compare", str(make_plan("pass", "pass")), *out])
    assert failed.exit_code == 1 and "--resume goes on from here" in failed.stderr and "garbage" in failed.stderr
    assert "No verdict yet" in failed.stdout


def test_bench_serve_prints_and_saves(tmp_path):
    with stub_server(ttft_ms=20, tpot_ms=4) as url:
        words = ["bench", "serve", "--url", url, "--sessions", "6", "--turns", "2", "--input-tokens", "8"]
        words += ["--output-tokens", "6", "--concurrency", "3", "--slo-ttft-ms", "500", "--save", str(tmp_path / "s")]
        text = runner.invoke(app, words)
        assert text.exit_code == 0, text.output
        for part in ("completed            12", "slo share            1", "TTFT", "TPOT", "the client"):
            assert part in text.stdout, text.stdout
        as_json = runner.invoke(app, [*words, "--seed", "7", "--json", "--self-test"])
        said = json.loads(as_json.stdout)
        assert said["seed"] == 7 and said["completed"] == 12 and isinstance(said["client_bottleneck"], list)
    saved = json.loads((tmp_path / "s" / "vllm-bench.json").read_text())
    assert saved["completed"] == 12 and saved["max_concurrency"] == 3
    assert len((tmp_path / "s" / "requests.jsonl").read_text().splitlines()) == 12
    gone = runner.invoke(app, ["bench", "serve", "--url", "http://127.0.0.1:9", "--sessions", "1"])
    assert gone.exit_code == 1 and "does not list its models" in gone.stderr


def test_an_open_look_says_what_the_blocks_left_can_do(make_plan):
    body = "write(10.0 * random.Random(count('noise')).gauss(1, 0.03))"
    plan = make_plan(body, body, "blocks = 4\nlooks = [2, 4]\nmargin = 0.0001")
    done = runner.invoke(app, ["compare", str(plan), "--out", str(plan.parent / "records")])
    assert done.exit_code == 0, done.output
    assert re.search(r"look at 2 blocks, all: unresolved", done.stderr)
    assert re.search(
        r"with this spread, 4 blocks should resolve ±\d+\.\d+ % and find \d+\.\d+ % four times", done.stderr
    )
    assert re.search(r"all: unresolved, resolution ±", done.stdout)


def test_the_numbers_of_the_committed_report():
    reports = Path(__file__).parents[2] / "docs" / "reports"
    words = ["compare", "--from", str(reports / "prefill-chunk.csv"), "--margin", "0.05", "--json"]
    said = json.loads(runner.invoke(app, words).stdout)["cells"]["all"]
    page = (reports / "prefill-chunk.html").read_text()
    assert said["verdict"] == "faster" and f"B is {said['speedup']:.1%}".replace("%", " %") in page
