"""What the machine did while a launch ran: CPU time of others, clocks, other processes on the GPU."""

import json
import os
import subprocess
import sys
import time

import pytest

from deltagram.experiments.environment import PROC, Watch, capture, session_cpu_seconds, session_processes, start_time
from deltagram.experiments.launch import broken_rules
from deltagram.experiments.plan import Rules

BURN = "import time; t = time.process_time()\nwhile time.process_time() < t + 0.6: pass"
RULES = Rules("equal", True, 0.0, 0.0, True, True, True, 0.2, 0.1, 20, 3600.0)


@pytest.mark.skipif(not PROC.is_dir(), reason="the CPU time of other processes is only known where there is /proc")
def test_the_cpu_time_of_a_launch_is_not_that_of_others():
    watch = Watch()
    watch.start()
    command = [sys.executable, "-S", "-c", BURN + "\nprint(flush=True)\ninput()"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None and process.stdout.readline() == b"\n"  # it has burnt what it will
    used = session_cpu_seconds(process.pid)
    assert used >= 0.58  # 0.6 seconds, less a tick of 10 ms each of user and system time that has begun
    assert session_processes(process.pid) == {process.pid}
    began = watch.began
    facts = watch.stop(used)
    seconds = (time.monotonic() - began) * (os.cpu_count() or 1)
    without = watch.stop(0.0)["other_cpu_share"]  # the same launch, were its time not known to be ours
    assert without - facts["other_cpu_share"] == pytest.approx(used / seconds, abs=0.15)
    process.communicate(b"\n")
    assert session_processes(process.pid) == set()


def test_a_process_is_named_by_its_id_and_its_start():
    process = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    assert start_time(process.pid) == start_time(process.pid) is not None
    process.communicate(b"\n")
    assert start_time(process.pid) is None


FAKE_SMI = """#!/bin/sh
case "$1" in
  *compute-apps*) echo "{others}" ;;
  *clocks_event*) {events} && echo "1980, 0x0000000000000040" ;;
  *clocks_throttle*) echo "1980, 0x0000000000000005" ;;
  *) echo "NVIDIA H200, GPU-1, 570.1, 1980, 1980, 700.00, 35" ;;
esac
"""


@pytest.fixture
def fake_gpu(tmp_path, monkeypatch):
    def make(others="", events=True):
        smi = tmp_path / "nvidia-smi"
        smi.write_text(FAKE_SMI.format(others=others, events=str(events).lower()))
        smi.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return make


@pytest.mark.parametrize(("events", "reason"), [(True, "hardware thermal"), (False, "power cap")])
def test_throttled_clocks_are_seen_and_named(fake_gpu, events, reason):
    fake_gpu(events=events)
    watch = Watch(period_s=0.05)
    watch.start()
    time.sleep(0.8)
    facts = watch.stop(0.0)
    assert facts["throttled"] == [reason] and facts["gpu_clock_mhz"] == 1980 and facts["other_gpu_processes"] == 0
    assert ("throttled", f"clocks were throttled: {reason}") in broken_rules(
        facts | {"other_cpu_share": 0}, RULES, None
    )


def test_another_process_on_the_gpu_is_seen(fake_gpu):
    fake_gpu(others=os.getppid())
    watch = Watch()
    watch.start()
    facts = watch.stop(0.0) | {"other_cpu_share": 0.0, "throttled": []}
    assert facts["other_gpu_processes"] == 1
    assert [rule for rule, _ in broken_rules(facts, RULES, None)] == ["other_gpu_process"]


def test_the_environment_is_whole_and_names_nobody(fake_gpu, tmp_path):
    fake_gpu()
    found = capture(tmp_path)
    assert found["gpus"][0]["name"] == "NVIDIA H200" and found["gpus"][0]["driver_version"] == "570.1"
    assert found["cpus"] >= 1 and found["commit"] is None and found["versions"]["numpy"]
    text = json.dumps(found)
    assert os.uname().nodename not in text or len(os.uname().nodename) < 4
    assert str(tmp_path) not in text


def test_each_rule_by_itself():
    fine = {
        "digests": {"a": "1", "b": "2"}, "wrong_lengths": 0, "failed_share": 0.0, "cache_hit_share": 0.0,
        "client_late": [], "throttled": [], "other_gpu_processes": 0, "other_cpu_share": 0.1,
        "drift": -0.05, "steps": 20,
    }  # fmt: skip
    reference = {"a": "1", "b": "2", "c": "3"}
    assert broken_rules(fine, RULES, reference) == []
    assert broken_rules({}, RULES, None) == []  # nothing told, nothing broken
    for rule, change in {
        "output_digest": {"digests": {"a": "1", "b": "other"}},
        "output_lengths": {"wrong_lengths": 1},
        "max_failed_share": {"failed_share": 0.01},
        "max_cache_hit_share": {"cache_hit_share": 0.01},
        "client_late": {"client_late": ["slow"]},
        "throttled": {"throttled": ["power cap"]},
        "other_gpu_process": {"other_gpu_processes": 2},
        "max_other_cpu_share": {"other_cpu_share": 0.21},
        "max_drift": {"drift": -0.11},
        "min_steps": {"steps": 19},
    }.items():
        assert [name for name, _ in broken_rules({**fine, **change}, RULES, reference)] == [rule]
    off = Rules("ignore", False, 1.0, None, False, False, False, None, None, 2, 3600.0)
    worst = {
        "digests": {"a": "x"},
        "wrong_lengths": 9,
        "failed_share": 1.0,
        "cache_hit_share": 1.0,
        "client_late": ["x"],
    }
    worst |= {"throttled": ["x"], "other_gpu_processes": 9, "other_cpu_share": 0.9, "drift": 3.0, "steps": 2}
    assert broken_rules(worst, off, reference) == []
