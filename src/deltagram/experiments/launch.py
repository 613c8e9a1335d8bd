"""One launch: a fresh process, from its start to one number or a named state.

    ok           a number, and no rule broken
    invalid      a number, and a rule of the plan that throws it out
    died         a process ended by itself where it should not, or with an error
    not-ready    the readiness probe did not pass in time
    hung         the measure did not finish in time
    garbage      it finished, and what it left could not be read
    interrupted  cut off from outside

Only ok launches count. Every process runs in a session of its own, whose whole group is ended with the launch.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deltagram.experiments.arms import arm_command
from deltagram.experiments.environment import Watch, session_cpu_seconds, session_processes, start_time
from deltagram.experiments.measure import Garbage, Measured, measure_load, read_command, read_trace
from deltagram.experiments.plan import Arm, Cell, fill
from deltagram.experiments.records import now

POLL_S = 0.05
GRACE_S = 10.0  # between asking a process to end and making it
TAIL_CHARACTERS = 600
PACKAGE = Path(__file__).parents[1]
SESSIONS = "sessions.txt"  # id and start of each process, to find them again after a crash


class LaunchError(Exception):
    """A launch that ends in one of the bad states; `state` names it."""

    def __init__(self, state: str, reason: str) -> None:
        super().__init__(reason)
        self.state = state


@dataclass
class Launched:
    """A started process and the files its output goes to."""

    process: subprocess.Popen[bytes]
    output: Path
    errors: Path
    cpu_s: float = field(default=0.0)

    def end(self) -> None:
        """Ends the whole session; its CPU time is read first, while it can be."""
        self.cpu_s = max(self.cpu_s, session_cpu_seconds(self.process.pid))
        for sign, patience in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
            try:
                os.killpg(self.process.pid, sign)
            except ProcessLookupError:
                break
            deadline = time.monotonic() + patience
            while time.monotonic() < deadline and (self.process.poll() is None or session_processes(self.process.pid)):
                time.sleep(POLL_S)
        self.process.wait()

    def said(self) -> str:
        """The end of what it wrote, for the reason of a failure."""
        for file in (self.errors, self.output):
            text = file.read_text(errors="replace").strip()
            if text:
                return text[-TAIL_CHARACTERS:]
        return "it wrote nothing"


def run_launch(arm: Arm, cell: Cell, folder: Path, prompts: Path | None, tree: Path | None) -> dict[str, Any]:
    """Launches `arm`, measures `cell`, ends everything: {"state", "reason", "number", "facts", ...}.

    folder: of this launch's files. tree: the checkout of the arm's commit. KeyboardInterrupt passes through, after the
    processes have been ended.
    """
    watch, launched = Watch(), list[Launched]()
    started, clock = now(), time.monotonic()
    outcome: dict[str, Any]
    watch.start()
    try:
        with ExitStack() as cleanup:
            measured = _measure(arm, cell, folder, prompts, tree, watch, launched, cleanup)
        outcome = {"state": "ok", "reason": "", **measured.row()}
    except LaunchError as error:
        outcome = {"state": error.state, "reason": str(error)}
    except Garbage as error:
        outcome = {"state": "garbage", "reason": str(error)}
    finally:
        facts = watch.stop(sum(one.cpu_s for one in launched))
    outcome["facts"] = {**outcome.get("facts", {}), **facts}
    return {**outcome, "started": started, "seconds": time.monotonic() - clock, "ended": time.time()}


def _measure(
    arm: Arm,
    cell: Cell,
    folder: Path,
    prompts: Path | None,
    tree: Path | None,
    watch: Watch,
    launched: list[Launched],
    cleanup: ExitStack,
) -> Measured:
    measure, port = cell.measure, _free_port()
    trace = folder / "trace.jsonl"
    values = {
        **cell.values,
        "port": str(port),
        "launch": str(folder),
        "trace": str(trace),
        "prompts": str(prompts) if prompts else "",
        "python": sys.executable,
    }
    command, ready_url = arm_command(arm, cell, folder, values)
    where = tree or arm.folder
    environment = {**os.environ, **{key: fill([text], values)[0] for key, text in arm.environment.items()}}
    source = tree / "src" if tree is not None else PACKAGE.parent if arm.model is not None else None
    if source is not None:  # the engine of the commit, or the one that this module belongs to
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(source), environment.get("PYTHONPATH"))))

    def start(command: Sequence[str], name: str) -> Launched:
        output, errors = folder / f"{name}.out", folder / f"{name}.err"
        with open(output, "wb") as out, open(errors, "wb") as err:
            try:
                process = subprocess.Popen(
                    command, cwd=where, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                    start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise LaunchError("died", f"cannot start {command[0]!r}: {error.strerror}") from None
        launched.append(Launched(process, output, errors))
        cleanup.callback(launched[-1].end)
        with open(folder / SESSIONS, "a") as file:
            file.write(f"{process.pid} {start_time(process.pid)}\n")
        return launched[-1]

    served = start(command, "arm")
    watch.session = served.process.pid
    deadline = time.monotonic() + measure.timeout_s
    if ready_url is not None or arm.ready_output is not None:
        _wait_ready(served, arm, ready_url)
        deadline = time.monotonic() + measure.timeout_s
    if measure.kind == "load":
        assert ready_url is not None and cell.manifest is not None
        dead = "while it was measured"
        try:
            measured = measure_load(ready_url, cell, folder)
        except TimeoutError:
            raise LaunchError("hung", f"the load did not finish within {measure.timeout_s:g} s") from None
        except Garbage:
            if served.process.poll() is not None:
                raise LaunchError("died", _ending(served, dead)) from None
            raise
        if served.process.poll() is not None:
            raise LaunchError("died", _ending(served, dead))
        return measured
    runs = served
    if measure.command is not None:
        runs = start(fill(measure.command, values), "measure")
    _wait_end(runs, served, deadline, measure.timeout_s)
    if measure.kind == "step":
        return read_trace(trace, cell)
    return read_command(runs.output, measure)


def end_leftovers(folder: Path) -> None:
    """Ends what a launch that a crash cut off may have left running."""
    file = folder / SESSIONS
    for line in file.read_text().splitlines() if file.exists() else ():
        pid, started = line.split(maxsplit=1)
        if str(start_time(int(pid))) == started:  # the same process, not another one with its id
            os.killpg(int(pid), signal.SIGKILL)


def _wait_ready(served: Launched, arm: Arm, url: str | None) -> None:
    deadline = time.monotonic() + arm.ready_timeout_s
    while time.monotonic() < deadline:
        if served.process.poll() is not None:
            raise LaunchError("died", _ending(served, "before it was ready"))
        if url is not None and _answers(url):
            return
        if arm.ready_output is not None:
            text = served.output.read_text(errors="replace") + served.errors.read_text(errors="replace")
            if re.search(arm.ready_output, text):
                return
        time.sleep(POLL_S)
    raise LaunchError("not-ready", f"not ready within {arm.ready_timeout_s:g} s; it last wrote: {served.said()}")


def _wait_end(runs: Launched, served: Launched, deadline: float, timeout_s: float) -> None:
    while runs.process.poll() is None:
        # Read often, since what a process has used is gone with it.
        runs.cpu_s = max(runs.cpu_s, session_cpu_seconds(runs.process.pid))
        if runs is not served and served.process.poll() is not None:
            raise LaunchError("died", _ending(served, "while it was measured"))
        if time.monotonic() > deadline:
            raise LaunchError("hung", f"not finished within {timeout_s:g} s; it last wrote: {runs.said()}")
        time.sleep(POLL_S)
    if runs.process.returncode != 0:
        raise LaunchError("died", _ending(runs, "with an error"))


def _ending(launched: Launched, when: str) -> str:
    code = launched.process.returncode
    how = f"was ended by signal {-code}" if code < 0 else f"ended with exit status {code}"
    return f"it {how} {when}; it last wrote: {launched.said()}"


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2.0) as response:
            return bool(200 <= response.status < 300)
    except (urllib.error.URLError, OSError, ValueError):
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def broken_rules(facts: Mapping[str, Any], rules: Any, reference: Mapping[str, str] | None) -> list[tuple[str, str]]:
    """(rule, what broke it) of a launch with these facts. reference: the digests its outputs must equal."""
    broken = []

    def check(rule: str, holds: bool, found: str) -> None:
        if not holds:
            broken.append((rule, found))

    def above(fact: str, limit: float | None) -> bool:
        return limit is not None and facts.get(fact) is not None and facts[fact] > limit

    if rules.output_digest != "ignore" and reference is not None:
        digests = facts.get("digests") or {}
        other = [key for key, digest in digests.items() if reference.get(key, digest) != digest]
        check(
            "output_digest",
            not other,
            f"{len(other)} of {len(digests)} outputs differ, {other[0] if other else ''} first",
        )
    if rules.output_lengths:
        wrong = facts.get("wrong_lengths") or 0
        check("output_lengths", not wrong, f"{wrong} outputs are not as long as asked for")
    failed = facts.get("failed_share") or 0.0
    check("max_failed_share", failed <= rules.max_failed_share, f"{failed:.1%} of the requests failed")
    hits = facts.get("cache_hit_share") or 0.0
    check(
        "max_cache_hit_share", not above("cache_hit_share", rules.max_cache_hit_share),
        f"{hits:.1%} of the prompt tokens came from a cache",
    )  # fmt: skip
    late = facts.get("client_late") or []
    check("client_late", not (rules.client_late and late), "the client was the bottleneck: " + "; ".join(late))
    throttled = facts.get("throttled") or []
    check("throttled", not (rules.throttled and throttled), "clocks were throttled: " + ", ".join(throttled))
    others = facts.get("other_gpu_processes") or 0
    check("other_gpu_process", not (rules.other_gpu_process and others), f"{others} other processes on the GPU")
    share = facts.get("other_cpu_share") or 0.0
    check(
        "max_other_cpu_share", not above("other_cpu_share", rules.max_other_cpu_share),
        f"others used {share:.1%} of the CPUs (limit {rules.max_other_cpu_share or 0.0:.1%})",
    )  # fmt: skip
    drift = facts.get("drift")
    check(
        "max_drift", rules.max_drift is None or drift is None or abs(drift) <= rules.max_drift,
        f"the later half of the steady steps differs by {drift or 0.0:+.1%} (limit {rules.max_drift or 0.0:.1%})",
    )  # fmt: skip
    steps = facts.get("steps")
    check("min_steps", steps is None or steps >= rules.min_steps, f"{steps} steady steps; expected {rules.min_steps}")
    return broken
