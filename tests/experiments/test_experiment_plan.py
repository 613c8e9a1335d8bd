"""A plan is valid once it exists; a bad one names all its problems at once."""

from pathlib import Path

import pytest

from deltagram.experiments.plan import ORDERS, fill
from deltagram.experiments.read_plan import load_plan, parse_plan

GOOD = """
name = "kernels"
[design]
margin = 0.01
blocks = 6
looks = [4, 6]
[arm.A]
command = "python serve.py --port {port} --batch {batch}"
ready = {url = "http://127.0.0.1:{port}/health", timeout_s = 30}
[arm.B]
command = ["python", "serve.py", "--fast", "--port", "{port}", "--batch", "{batch}"]
env = {MODE = "{batch}"}
ready = {url = "http://127.0.0.1:{port}/health"}
[measure]
kind = "load"
number = "output_throughput"
concurrency = 4
slo = {ttft_ms = 2930, tpot_ms = 21.74}
[prompts]
sessions = 3
input_tokens = 10
output_tokens = 5
[[cell]]
name = "one"
set = {batch = 1}
[[cell]]
name = "eight"
set = {batch = 8}
measure = {concurrency = 8, number = "p95_ttft_ms"}
prompts = {sessions = 16}
[invalid]
max_cache_hit_share = 0.0
output_digest = "per-arm"
"""


def test_a_good_plan_reads_as_written(tmp_path):
    plan = parse_plan(GOOD, tmp_path)
    one, eight = plan.cells
    assert plan.design.looks == (4, 6) and plan.design.alpha == 0.05 and plan.design.retries == 3
    assert plan.arms["A"].command == ("python", "serve.py", "--port", "{port}", "--batch", "{batch}")
    assert plan.arms["A"].ready_timeout_s == 30 and plan.arms["B"].stays_up
    assert (one.measure.load.concurrency, eight.measure.load.concurrency) == (4, 8)
    assert one.measure.better == "higher" and eight.measure.better == "lower" and eight.measure.number == "p95_ttft_ms"
    assert one.measure.load.slo_tpot_ms == 21.74
    assert (len(one.manifest.sessions), len(eight.manifest.sessions)) == (3, 16)
    assert one.values == {"batch": "1"}
    assert plan.rules.max_cache_hit_share == 0.0 and plan.rules.output_digest == "per-arm" and plan.rules.client_late


def test_orders_are_random_balanced_blocks_fixed_by_the_seed(tmp_path):
    plan = parse_plan(GOOD.replace("blocks = 6", "blocks = 60").replace("[4, 6]", "[60]"), tmp_path)
    orders = plan.orders()
    assert orders == plan.orders() and len(orders) == 60
    for cell in ("one", "eight"):
        seen = [block[cell] for block in orders]
        assert set(seen) == set(ORDERS) and 15 < seen.count("ABBA") < 45
    assert [o["one"] for o in orders] != [o["eight"] for o in orders]
    assert parse_plan(plan.source.replace("margin", "seed = 5\nmargin"), tmp_path).orders() != orders


def test_the_hash_is_of_the_plan_and_its_prompts(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"text": "hello", "output_tokens": 3}\n')
    source = GOOD.replace("sessions = 3\ninput_tokens = 10\noutput_tokens = 5", 'file = "p.jsonl"').replace(
        "prompts = {sessions = 16}\n", ""
    )
    first = parse_plan(source, tmp_path).sha256
    assert parse_plan(source, tmp_path).sha256 == first
    assert parse_plan(source + "# a word\n", tmp_path).sha256 != first
    (tmp_path / "p.jsonl").write_text('{"text": "hallo", "output_tokens": 3}\n')
    assert parse_plan(source, tmp_path).sha256 != first


def test_all_problems_in_one_message(tmp_path):
    bad = """
name = "a b"
speed = 1
[design]
margin = 2
blocks = 1
looks = [3, 2]
spending = "all"
sead = 3
[arm.A]
command = "python x.py"
model = "m"
settings = 3
[arm.B]
ready = {}
folder = "nowhere"
[measure]
kind = "load"
number = "fastness"
rate = 3
arrivals = "closed"
slo = {ttft = 3}
[prompts]
sessions = 0
input_tokens = 10
[invalid]
max_failed_share = -1
output_digest = "same"
[[cell]]
name = "x"
[[cell]]
name = "x"
"""
    with pytest.raises(ValueError) as error:
        parse_plan(bad, tmp_path)
    text = str(error.value)
    for part in (
        "name is 'a b'", "speed is not a key", "design.margin is 2", "design.blocks is 1", "design.looks is [3, 2]",
        "design.spending is 'all'", "design.sead is not a key", "arm.A needs either command or model",
        "arm.A.settings is 3", "arm.B needs either command or model", "arm.B.ready needs either url or output",
        "arm.B.folder is", "cell[0].measure.number is 'fastness'", "cell[0].measure.concurrency is missing",
        "cell[0].measure.rate is 3", "cell[0].measure.slo.ttft is not a key", "prompts.sessions is 0",
        "prompts.output_tokens is missing", "invalid.max_failed_share is -1", "invalid.output_digest is 'same'",
        "cell names are ['x', 'x']",
    ):  # fmt: skip
        assert part in text, part
    assert len(set(text.splitlines())) == len(text.splitlines())


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("{batch}", "{size}"), "{size} in '{size}' is no placeholder"),
        (("set = {batch = 8}", "set = {size = 8}"), "cell 'eight' sets ['size']; the first sets ['batch']"),
        (('ready = {url = "http://127.0.0.1:{port}/health"}\n', ""), "arm.B.ready.url is missing"),
        (('kind = "load"', 'kind = "load"\ncommand = "x"'), "command does not go with kind = 'load'"),
        (("concurrency = 4\n", ""), "concurrency is missing"),
    ],
)
def test_relations_between_the_parts(tmp_path, change, problem):
    with pytest.raises(ValueError) as error:
        parse_plan(GOOD.replace(*change), tmp_path)
    assert problem in str(error.value)


def test_what_measures_an_arm_must_be_said_once(tmp_path):
    base = (
        "name='x'\n[design]\nmargin=0.01\nblocks=2\n[arm.A]\ncommand='a'\n{}\n[arm.B]\ncommand='b'\n{}\n[measure]\n{}\n"
    )
    ready = "ready = {output = 'up'}"
    cases = [
        (ready, ready, "kind='step'", "arm.A stays up, so measure.command must say"),
        ("", "", "kind='step'\ncommand='c'", "arm.A has no ready probe"),
        ("", "", "kind='command'", "better is missing"),
        ("", "", "kind='command'\nbetter='lower'", "needs either regex"),
        ("", "", "kind='command'\nbetter='lower'\nregex='t=[0-9]+'", "expected one with a (group)"),
        ("", "", "kind='command'\nbetter='lower'\nregex='('", "is no regular expression"),
    ]
    for a, b, measure, problem in cases:
        with pytest.raises(ValueError) as error:
            parse_plan(base.format(a, b, measure), tmp_path)
        assert problem in str(error.value)
    parse_plan(base.format(ready, ready, "kind='step'\ncommand='c'"), tmp_path)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match="cannot read the plan"):
        load_plan(tmp_path / "none.toml")
    with pytest.raises(ValueError, match="not TOML"):
        parse_plan("name = ", tmp_path)
    with pytest.raises(ValueError, match="needs \\[prompts\\]"):
        head = GOOD.partition("[prompts]")[0]
        parse_plan(head + "[[cell]]\nname='one'\nset={batch=1}\n", tmp_path)


def test_placeholders_fill_and_other_braces_stay():
    assert fill(['{"a": {port}}', "{other}"], {"port": "81"}) == ['{"a": 81}', "{other}"]


def test_the_examples_in_the_docs_are_valid():
    folder = Path(__file__).parents[2] / "docs" / "examples"
    plans = sorted(folder.glob("*.toml"))
    assert len(plans) >= 3
    for plan in plans:
        load_plan(plan)
