"""A hang names the rank that is missing, fails what it keeps waiting, and ends every process within seconds."""

import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deltagram.parallel.launch import environment, free_port, launch
from deltagram.parallel.watchdog import EXIT_CODE, Collective, RankState, diagnose, process_state

RANK, SERVING = (Path(__file__).parent / name for name in ("hanging_rank.py", "serving_rank.py"))
WITH_REQUESTS, ASLEEP = ("request", "plan"), ("idle", "default", "plan")  # whose culprit's main thread sleeps
SCENARIOS = {  # the last of the ranks is the culprit; three of them where one is stopped, else two
    "stop": r"rank 2 is missing: its process \d+ is stopped; chain all-gather of step 20 \(plan 0+14\) waits for it",
    "die": r"rank 1 is missing: its process \d+ is gone; chain all-gather of step 20 \(plan 0+14\) waits for it",
    "skip": r"rank 1 is missing: in step 2\d, HangError: it skipped chain all-gather of step 20 .*, which rank 0 "
    r"is in, and entered chain all-gather of step 21",
    "idle": r"rank 1 is missing: it has not entered chain all-gather of step 20, last in chain all-gather of step 19",
    "default": r"rank 1 is missing: it has not entered chain all-gather of step 20",
    "request": r"rank 1 is missing: its process \d+ is stopped",
    "plan": r"rank 1 is missing: it has not entered agreement all-gather of step \d+, last in agreement all-gather",
    "helper": r"rank 1 is missing: in step 20, HelperError: helper thread reading rows 0 has died",
}


@pytest.fixture(scope="module")
def ended():
    """Every scenario's ranks at once, to their ends: exit code, output, errors, and seconds since it went wrong."""
    running: dict[str, list[subprocess.Popen[str]]] = {}
    for scenario in SCENARIOS:
        port, ranks = free_port(), 3 if scenario == "stop" else 2
        running[scenario] = [
            subprocess.Popen(
                [sys.executable, str(SERVING if scenario in WITH_REQUESTS else RANK), scenario],
                env=os.environ | environment(rank, ranks, port) | {"OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
    ends: dict[subprocess.Popen[str], float] = {}
    processes = [process for group in running.values() for process in group]
    deadline = time.monotonic() + 180
    while len(ends) < len(processes) and time.monotonic() < deadline:
        ends |= {p: time.monotonic() for p in processes if p not in ends and p.poll() is not None}
        for stopped in ("stop", "request"):
            if all(p in ends for p in running[stopped][:-1]):
                running[stopped][-1].kill()  # as parallel/launch.py does
        time.sleep(0.05)
    for process in processes:
        process.kill()  # one that has not ended, which its test says
    return {
        scenario: [(p.returncode, *p.communicate(), ends.get(p, math.inf)) for p in group]
        for scenario, group in running.items()
    }


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_hang_is_named_by_every_rank_that_can_and_ends_it(ended, scenario):
    results = ended[scenario]
    if scenario in WITH_REQUESTS:
        assert "RuntimeError: the step that ran this request failed: HangError: rank 1 is missing" in results[0][1]
    began = float(re.search(r"^began (\S+)", results[-1][1], re.MULTILINE)[1])
    survivors = results[:-1] if scenario in ("stop", "die", "request") else results
    for rank, (code, out, err, ended_at) in enumerate(survivors):
        assert code == EXIT_CODE, (code, out, err)
        named = re.search(rf"^rank {rank}: (.*)$", err, re.MULTILINE)
        assert named and re.match(SCENARIOS[scenario], named[1]), err
        assert f"request failed: {named[1]}" in out
        assert "entered" in err and "Thread 0x" in err and "_rank.py" in err, "its ring and its stacks"
        assert ended_at - began < 15
        if not (scenario in ASLEEP and rank == len(results) - 1):
            assert "raised H" in out, "the main thread was set free"


def test_a_report_that_cannot_be_made_does_not_keep_the_process_from_ending():
    """Neither a closed stderr, which keeps it from nobody else, nor what on_hang raises."""
    code = """
import os, time
from deltagram.parallel.groups import join
group = join("cpu", deadline=0.5)
group.watchdog.on_hang = lambda report: (print(report, flush=True), 1 / 0)
os.close(2)
with group.watchdog.step(0, "0" * 16):
    time.sleep(60)
"""
    variables = os.environ | environment(0, 1, free_port())
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stderr) == (EXIT_CODE, "")
    assert done.stdout.startswith("a step took too long")


def test_a_report_names_whoever_the_collective_waits_for():
    def state(turn, left, step=7, process="runs", failure=""):
        return RankState(1, process, step, failure, {1: Collective(turn, "chain all-gather", step, "ab", left)})

    assert diagnose([state(3, False), state(2, True, 6), state(3, False)]) == (
        "rank 1 is missing: it has not entered chain all-gather of step 7, last in chain all-gather of step 6; "
        "chain all-gather of step 7 (plan ab) waits for it"
    )
    assert diagnose([state(3, False), state(3, False, process="stopped")]).startswith("rank 1 is missing: its process")
    failed = diagnose([state(3, False), state(2, True, failure="ValueError: no rows")])
    assert failed.startswith("rank 1 is missing: in step 7, ValueError: no rows; chain all-gather")
    assert "no rank waits" in diagnose([state(3, True), state(3, True)])


def test_the_state_of_a_process_is_read():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    try:
        assert process_state(process.pid) == "runs"
        process.send_signal(19)
        deadline = time.monotonic() + 5
        while process_state(process.pid) != "stopped" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert process_state(process.pid) == "stopped"
    finally:
        process.kill()
    deadline = time.monotonic() + 5
    while process_state(process.pid) != "gone" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process_state(process.pid) == "gone", "a zombie is gone"
    process.wait()


def test_launching_ends_all_ranks_when_one_fails_and_passes_its_exit_code_on():
    code = "import os, time; rank = int(os.environ['RANK']); time.sleep(0.2)\nif rank == 1: os._exit(7)\n"
    began = time.monotonic()
    assert launch(["-c", code], 3) == 7
    assert launch(["-c", "import os; assert os.environ['WORLD_SIZE'] == '2'"], 2) == 0
    assert time.monotonic() - began < 30
    with pytest.raises(ValueError, match="--ranks must be at least 1, got 0"):
        launch(["-c", ""], 0)
