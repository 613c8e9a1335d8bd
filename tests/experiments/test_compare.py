"""Experiments end to end, with arms that die, hang, lie and drift: each ends in a named state to go on from."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from deltagram.experiments import conclude, records
from deltagram.experiments.compare import Vetoed, compare
from deltagram.experiments.environment import start_time
from deltagram.experiments.read_plan import load_plan
from deltagram.experiments.records import Record

SLOW, FAST = "write(10.0)", "write(8.0)"
# The noise is the same in every run of a test: with a new one, one run in twenty would find a winner among equals.
NOISY = "write(10.0 * random.Random(count('noise')).gauss(1, 0.004))"


class Silent:
    def launching(self, what, done, total, left_s):
        self.last = (what, done, total, left_s)

    def launched(self, launch): ...

    def looked(self, blocks, planned, results): ...


def run(plan: Path, **how):
    return compare(load_plan(plan), plan.parent / "records", progress=Silent(), **how)


def test_a_faster_arm_is_found_and_everything_is_recorded(make_plan):
    plan = make_plan(NOISY, "write(8.0 * random.Random(count('noise')).gauss(1, 0.004), acceptance_length=1.75)")
    outcome = run(plan)
    result, record = outcome.result, outcome.record
    assert result["state"] == "done" and result["cells"]["all"]["verdict"] == "faster"
    assert result["cells"]["all"]["speedup"] == pytest.approx(0.25, abs=0.03)
    launches = record.launches()
    assert [launch["number"] > 9 for launch in launches if launch["arm"] == "A"] == [True] * 6
    for block, order in enumerate(record.experiment["orders"]):
        assert "".join(one["arm"] for one in launches if one["block"] == block) == order["all"]
    assert len({launch["facts"]["steps"] for launch in launches}) >= 1
    # Acceptance length stands beside the step time, not in it.
    assert all(one["beside"]["acceptance_length"] == 1.75 for one in launches if one["arm"] == "B")
    for launch in launches:
        folder = record.folder / "launches" / launch["folder"]
        assert {"launch.json", "trace.jsonl", "arm.out", "arm.err"} <= {file.name for file in folder.iterdir()}
    names = {file.name for file in record.folder.iterdir()}
    assert {"plan.toml", "experiment.json", "state.json", "result.json", "results.csv", "report.html"} <= names
    environment = record.experiment["environment"]
    assert environment["cpus"] and environment["python"] and len(environment["load_average"]) == 3
    assert record.state["state"] == "done" and result["plan_sha256"] == load_plan(plan).sha256
    # The table that it writes is one that --from reads.
    from deltagram.experiments import paired_tests
    from deltagram.experiments.tables import read_blocks

    again = paired_tests(read_blocks(record.folder / "results.csv"), 0.05)["all"]
    assert again.interval == pytest.approx(tuple(result["cells"]["all"]["interval"]))


def test_equal_arms_stop_at_the_first_look_that_decides(make_plan):
    design = "blocks = 6\nlooks = [3, 6]\nmargin = 0.2"
    outcome = run(make_plan(NOISY, NOISY, design))
    assert outcome.result["looked_at"] == 3 and outcome.result["cells"]["all"]["verdict"] == "equivalent"
    assert len(outcome.record.launches()) == 12


def test_cells_are_measured_apart_and_may_be_better_either_way(make_plan):
    body = "print('rate', 100 * float(sys.argv[1]) * random.Random(os.getpid()).gauss(1, 0.004))"
    extra = """
    [[cell]]
    name = "up"
    set = {factor = 1.5}
    [[cell]]
    name = "down"
    set = {factor = 0.7}
    measure = {better = "lower"}
    """
    measure = "kind = 'command'\nregex = 'rate ([0-9.]+)'\nbetter = 'higher'"
    plan = make_plan(body, body, "blocks = 3\nmargin = 0.01", extra, measure=measure)
    plan.write_text(plan.read_text().replace("'{trace}'", "'1'", 1).replace("'{trace}'", "'{factor}'"))
    cells = run(plan).result["cells"]
    assert cells["up"]["verdict"] == "faster" and cells["up"]["speedup"] == pytest.approx(0.5, abs=0.03)
    assert cells["down"]["verdict"] == "faster" and cells["down"]["speedup"] == pytest.approx(1 / 0.7 - 1, abs=0.05)


BAD = {
    "died": ("sys.exit('out of memory')", "exit status 1 with an error; it last wrote: out of memory"),
    "died-by-signal": ("os.kill(os.getpid(), 9)", "was ended by signal 9"),
    "hung": ("print('loading', flush=True); time.sleep(60)", "not finished within 1 s; it last wrote: loading"),
    "garbage-none": ("pass", "no step trace: No such file or directory"),
    "garbage-text": ("open(trace, 'w').write('hello')", "line 1 of the step trace is 'hello'"),
    "garbage-steps": ("write(1.0, steps=1)", "1 decode steps"),
    "garbage-zero": ("write(0.0)", "steps that are not above 0 ms"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_launch_ends_in_a_named_state(make_plan, kind):
    body, reason = BAD[kind]
    design = "blocks = 2\nmargin = 0.05\nretries = 0"
    outcome = run(make_plan(body, body, design, measure="kind = 'step'\ntimeout_s = 1"))
    (launch,) = outcome.record.launches()
    assert launch["state"] == kind.partition("-")[0] and reason in launch["reason"]
    assert outcome.result["state"] == "failed" and reason in outcome.result["reason"]
    assert outcome.result["cells"]["all"]["verdict"] == "unfinished"
    assert "No verdict yet" in (outcome.record.folder / "report.html").read_text()


def test_a_command_that_cannot_be_started_is_a_launch_that_died(make_plan):
    plan = make_plan("pass", "pass", "blocks = 2\nmargin = 0.05\nretries = 0")
    plan.write_text(plan.read_text().replace("{python}", "no-such-program"))
    (launch,) = run(plan).record.launches()
    assert launch["state"] == "died" and "cannot start 'no-such-program'" in launch["reason"]


def test_a_launch_that_fails_now_and_then_is_launched_again(make_plan):
    flaky = "sys.exit('flaky') if count('calls') == 2 else write(10.0)"
    outcome = run(make_plan(flaky, flaky, "blocks = 2\nmargin = 0.05\nretries = 1"))
    assert outcome.result["state"] == "done" and len(outcome.record.launches()) == 9
    (thrown,) = outcome.result["thrown_out"]
    assert thrown["state"] == "died" and "flaky" in thrown["reason"]


def test_a_failed_experiment_can_be_gone_on_from(make_plan):
    flaky = "sys.exit('no GPU') if 3 <= count('calls') < 5 else write(10.0)"
    plan = make_plan(flaky, flaky, "blocks = 2\nmargin = 0.05\nretries = 1")
    first = run(plan)
    assert first.result["state"] == "failed" and len(first.record.launches()) == 5
    with pytest.raises(ValueError, match="another version of the plan"):
        changed = plan.with_name("changed.toml")
        changed.write_text(plan.read_text().replace("retries = 1", "retries = 9"))
        run(changed, resume=True)
    second = run(plan, resume=True)
    assert second.record.folder == first.record.folder and second.result["state"] == "done"
    assert len(second.record.launches()) == 10 and len(second.result["thrown_out"]) == 2
    with pytest.raises(ValueError, match="test-001 is done"):
        run(plan, resume=True)


RULES = {
    "output_digest": ("write(10.0, digest='other' if count('calls') == 2 else 'same')", "", "1 of 1 outputs differ"),
    "output_lengths": (
        "write(10.0, output_tokens=[5, 4 if count('calls') == 2 else 5])",
        "[prompts]\nsessions = 2\ninput_tokens = 3\noutput_tokens = 5",
        "1 outputs are not as long",
    ),
    "max_cache_hit_share": (
        "write(10.0, cache_hit_share=0.5 if count('calls') == 2 else 0.0)",
        "[invalid]\nmax_cache_hit_share = 0.1",
        "50.0% of the prompt tokens came from a cache",
    ),
    "min_steps": ("write(10.0, steps=15 if count('calls') == 2 else 60)", "", "steady steps; expected 20"),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_broken_rule_throws_the_launch_out_and_is_named(make_plan, rule):
    body, extra, reason = RULES[rule]
    outcome = run(make_plan(body, body, "blocks = 2\nmargin = 0.05", extra))
    assert outcome.result["state"] == "done"
    (thrown,) = outcome.result["thrown_out"]
    assert (thrown["state"], thrown["rule"]) == ("invalid", rule) and reason in thrown["reason"]
    page = (outcome.record.folder / "report.html").read_text()
    assert rule in page and thrown["folder"] in page


def test_digests_may_differ_between_arms_when_the_plan_says_so(make_plan):
    a, b = "write(10.0, digest='a')", "write(10.0, digest='b')"
    design = "blocks = 2\nmargin = 0.05\nretries = 0"
    assert run(make_plan(a, b, design)).result["state"] == "failed"
    assert run(make_plan(a, b, design, "[invalid]\noutput_digest = 'per-arm'")).result["state"] == "done"
    assert run(make_plan(a, b, design, "[invalid]\noutput_digest = 'ignore'")).result["state"] == "done"


def command(plan: Path, *words: str) -> list[str]:
    out = str(plan.parent / "records")
    return [sys.executable, "-m", "deltagram.experiments", "compare", str(plan), "--out", out, *words]


def wait_for(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def launches_of(plan: Path) -> int:
    return len(list((plan.parent / "records").glob("*/launches/*/launch.json")))


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_stopping_it_loses_nothing(make_plan, sign):
    body = "open('pid', 'w').write(str(os.getpid())); time.sleep(60) if count('calls') == 5 else None\nwrite(10.0)"
    plan = make_plan(body, body, "blocks = 2\nmargin = 0.05")
    pid = plan.parent / "pid"
    process = subprocess.Popen(command(plan), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_for(lambda: launches_of(plan) == 5 and (plan.parent / "calls").stat().st_size == 6)
    hanging = int(pid.read_text())
    started = start_time(hanging)
    process.send_signal(sign)
    output, _ = process.communicate(timeout=30)
    record = Record(plan.parent / "records" / "test-001")
    if sign == signal.SIGKILL:
        assert record.state["state"] == "crashed" and start_time(hanging) == started  # nobody could end it
    else:
        assert process.returncode == 130 and "interrupted: stopped from outside" in output and "--resume" in output
        assert record.state["state"] == "interrupted" and start_time(hanging) is None
    assert sum(launch["state"] == "ok" for launch in record.launches()) == 5
    done = subprocess.run(command(plan, "--resume"), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
    assert start_time(hanging) is None or start_time(hanging) != started
    launches = record.launches()
    assert [launch["state"] for launch in launches] == ["ok"] * 5 + ["interrupted"] + ["ok"] * 3
    assert record.state["state"] == "done" and len(list((plan.parent / "records").iterdir())) == 1


def test_a_running_experiment_is_not_resumed_by_another(make_plan):
    plan = make_plan("time.sleep(30)", "time.sleep(30)", "blocks = 2\nmargin = 0.05")
    process = subprocess.Popen(command(plan), stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: list((plan.parent / "records").glob("*/launches/*/sessions.txt")))
        with pytest.raises(ValueError, match="still running"):
            run(plan, resume=True)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)


def test_a_block_that_lay_open_too_long_is_begun_again(make_plan):
    flaky = "sys.exit('x') if count('calls') == 2 else write(10.0)"
    plan = make_plan(flaky, flaky, "blocks = 2\nmargin = 0.05\nretries = 0", "[invalid]\nmax_gap_s = 0.5")
    assert run(plan).result["state"] == "failed"
    time.sleep(0.6)
    outcome = run(plan, resume=True)
    thrown = [(one["state"], one["rule"]) for one in outcome.result["thrown_out"]]
    assert thrown == [("invalid", "max_gap_s")] * 2 + [("died", None)]
    assert outcome.result["state"] == "done" and len(outcome.record.launches()) == 11


@pytest.mark.parametrize("where", ["before", "launch", "result"])
def test_a_disk_that_fills_is_a_state_and_can_be_gone_on_from(make_plan, monkeypatch, where):
    """The write fails with ENOSPC where the room ends: before a launch, at its record, or at the result."""
    plan = make_plan(SLOW, SLOW, "blocks = 2\nmargin = 0.05")
    name = {"before": ".room", "launch": "launch.json", "result": "result.json"}[where]
    real, calls = records.write_bytes, []

    def full(path, data):
        if path.name == name:
            calls.append(path)
            if where == "result" or len(calls) > 3:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(path, data)

    with monkeypatch.context() as patch:
        for place in (records, conclude):
            patch.setattr(place, "write_bytes", full)
        first = run(plan)
    assert first.record.state["state"] == "disk-full" and "No space left" in first.record.state["reason"]
    assert sum(launch["state"] == "ok" for launch in first.record.launches()) == {"result": 8}.get(where, 3)
    second = run(plan, resume=True)
    assert second.result["state"] == "done" and second.result["thrown_out"] == []
    assert json.loads((second.record.folder / "result.json").read_text())["cells"]["all"]["verdict"] == "equivalent"


def test_a_real_full_file_system(make_plan, tmp_path):
    """The same with a file system of 400 KiB, where this process may mount one."""
    plan = make_plan("write(10.0, steps=400)", "write(10.0, steps=400)", "blocks = 4\nmargin = 0.05")
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(small)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting a file system needs root: " + mounted.stderr.decode().strip())
    try:
        first = compare(load_plan(plan), small, progress=Silent())
        assert first.record.state["state"] == "disk-full"
        ok = sum(launch["state"] == "ok" for launch in first.record.launches())
        assert 1 <= ok < 16
        subprocess.run(["mount", "-o", "remount,size=20m", str(small)], check=True)
        second = compare(load_plan(plan), small, resume=True, progress=Silent())
        assert second.result["state"] == "done"
        assert sum(launch["state"] == "ok" for launch in second.record.launches()) == 16
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_aa_runs_a_against_itself_and_is_the_floor_of_what_follows(make_plan):
    plan = make_plan(NOISY, FAST)
    aa = run(plan, aa=True)
    assert aa.record.folder.name == "test-aa-001" and aa.result["cells"]["all"]["verdict"] == "equivalent"
    assert not [one for one in aa.record.launches() if one["number"] < 9]  # arm B was never launched
    outcome = run(plan)
    (floor,) = outcome.result["floor"]
    assert floor["record"] == "test-aa-001" and floor["cells"]["all"]["resolution"] < 0.05
    assert "Floor: A against itself" in (outcome.record.folder / "report.html").read_text()


@pytest.mark.parametrize(
    ("body", "why"),
    [
        # Launches get slower in the order ABBA cannot cancel: a false winner.
        (
            "write(10.0 + (2.0 if 'B' in os.path.basename(os.path.dirname(trace)).split('-')[2] else 0.0))",
            "slower than itself",
        ),
        ("write(10.0 * (1 + 0.4 * random.Random(count('calls') // 3).random()))", "wider than the margin"),
    ],
)
def test_an_aa_run_can_veto(make_plan, body, why):
    plan = make_plan(body, FAST, extra="[invalid]\noutput_digest = 'ignore'")
    run(plan, aa=True)
    with pytest.raises(Vetoed, match=why):
        run(plan)
    assert [folder.name for folder in (plan.parent / "records").iterdir()] == ["test-aa-001"]


SERVER = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if time.time() > ready_at else 503)
        self.end_headers()
        self.wfile.write(b'ok')
    def log_message(self, *words): pass
ready_at = time.time() + float({delay})
http.server.HTTPServer(('127.0.0.1', int(sys.argv[1])), Handler).serve_forever()
"""
SERVED = """kind = 'command'
command = ['{python}', '-c', 'print("ms 10.0")']
regex = 'ms ([0-9.]+)'
better = 'lower'
timeout_s = 20"""


PRINT = 'print("ms 10.0")'


def served(make_plan, body, measure=SERVED, ready="url = 'http://127.0.0.1:{port}/'", design="", timeout_s=10):
    plan = make_plan(body, body, design or "blocks = 2\nmargin = 0.05\nretries = 0", measure=measure)
    text = plan.read_text().replace("'{trace}']", f"'{{port}}']\nready = {{{ready}, timeout_s = {timeout_s}}}")
    plan.write_text(text)
    return plan


def test_an_arm_that_stays_up_is_waited_for_measured_and_ended(make_plan):
    outcome = run(served(make_plan, SERVER.format(delay=0.3)))
    assert outcome.result["state"] == "done" and len(outcome.record.launches()) == 8
    for launch in outcome.record.launches():
        assert launch["seconds"] > 0.3 and launch["number"] == 10.0
        for line in (outcome.record.folder / "launches" / launch["folder"] / "sessions.txt").read_text().splitlines():
            pid, started = line.split(maxsplit=1)
            assert start_time(int(pid)) != started  # nothing is left running


def test_ready_may_be_a_line_of_the_output(make_plan):
    body = "time.sleep(0.2); print('serving now', flush=True); time.sleep(60)"
    assert run(served(make_plan, body, ready="output = 'serving n'")).result["state"] == "done"


SLEEPS = SERVED.replace(PRINT, "import time; time.sleep(60)")
DIES = "import threading; threading.Timer(1, lambda: os._exit(7)).start()"
SERVED_BADLY = {
    "not-ready": ("print('loading', flush=True); time.sleep(60)", SERVED, "within 1 s; it last wrote: loading"),
    "died-early": ("sys.exit('port taken')", SERVED, "status 1 before it was ready; it last wrote: port taken"),
    "died-late": (DIES + SERVER.format(delay=0), SLEEPS, "exit status 7 while it was measured"),
    "garbage": (SERVER.format(delay=0), SERVED.replace("ms 10.0", "no number"), "no match of"),
    "hung": (SERVER.format(delay=0), SLEEPS.replace("timeout_s = 20", "timeout_s = 1"), "not finished within 1 s"),
}


@pytest.mark.parametrize("kind", SERVED_BADLY)
def test_a_served_arm_that_fails_ends_in_a_named_state(make_plan, kind):
    body, measure, reason = SERVED_BADLY[kind]
    (launch,) = run(served(make_plan, body, measure, timeout_s=1 if kind == "not-ready" else 10)).record.launches()
    assert launch["state"] in (kind, kind.partition("-")[0]) and reason in launch["reason"]


def test_a_process_that_ignores_sigterm_is_ended_all_the_same(make_plan, monkeypatch):
    from deltagram.experiments import launch as launching

    monkeypatch.setattr(launching, "GRACE_S", 0.3)
    body = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True)\ntime.sleep(60)"
    outcome = run(served(make_plan, body, ready="output = 'up'"))
    assert outcome.result["state"] == "done"
    assert all(launch["seconds"] < 8 for launch in outcome.record.launches())


def test_an_arm_may_be_a_commit(make_plan, tmp_path):
    repository = tmp_path / "repository"
    (repository / "src").mkdir(parents=True)
    shas = []
    for ms in ("10.0", "8.0"):
        (repository / "src" / "speed.py").write_text(f"MS = {ms}\n")
        git = ["git", "-C", str(repository), "-c", "user.name=x", "-c", "user.email=x@x"]
        if not shas:
            subprocess.run(["git", "init", "-q", str(repository)], check=True)
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "-qm", ms], check=True)
        shas.append(
            subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        )
    code = "import speed; print(dict(ms=speed.MS))"
    arms = "".join(
        f"[arm.{a}]\ncommand=['{{python}}','-c','{code}']\ncommit='{sha}'\n" for a, sha in zip("AB", shas, strict=True)
    )
    plan = repository / "plan.toml"
    plan.write_text(
        f"name='commits'\n[design]\nmargin=0.01\nblocks=2\n{arms}"
        "[measure]\nkind='command'\nbetter='lower'\nregex=\"'ms': ([0-9.]+)\"\n"
    )
    cell = run(plan).result["cells"]["all"]
    assert cell["verdict"] == "faster" and cell["speedup"] == pytest.approx(0.25)
    plan.write_text(plan.read_text().replace(shas[0], "nowhere").replace("commits", "unknown"))
    with pytest.raises(ValueError, match="commit is 'nowhere'"):
        run(plan)


def test_progress_tells_the_time_left(make_plan):
    progress = Silent()
    plan = make_plan(SLOW, SLOW, "blocks = 2\nmargin = 0.05")
    compare(load_plan(plan), plan.parent / "records", progress=progress)
    what, done, total, left_s = progress.last
    assert what == "block 2/2, all, launch 4 of 4: A" or what.endswith(": B")
    assert (done, total) == (7, 8) and 0.0 < left_s < 5.0


def test_an_interrupt_in_this_process_is_recorded(make_plan):
    plan = make_plan("time.sleep(30)", "time.sleep(30)", "blocks = 2\nmargin = 0.05")
    threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    outcome = run(plan)
    assert outcome.result["state"] == "interrupted"
    assert [launch["state"] for launch in outcome.record.launches()] == ["interrupted"]
