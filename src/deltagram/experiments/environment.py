"""What the machine is, and what else it did while a launch ran.

`capture` describes the machine once per experiment. A `Watch` runs beside a launch and reports what the rules ask
about: throttled clocks, other processes on the GPU, and the CPU time that was not ours. What a machine cannot tell (no
nvidia-smi, no /proc) is None, and the rule about it says nothing: the report lists it as not checked.
"""

import os
import platform
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

GPU_FIELDS = ("name", "uuid", "driver_version", "clocks.sm", "clocks.max.sm", "power.limit", "temperature.gpu")
# Bits of nvidia-smi's clock event reasons that mean slower than asked for.
THROTTLES = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}
PACKAGES = ("deltagram", "torch", "triton", "numpy", "scipy", "aiohttp")
PROC = Path("/proc")  # Linux; without it a launch's CPU time is not known
TICKS = os.sysconf("SC_CLK_TCK")


def capture(folder: Path) -> dict[str, Any]:
    """The machine, the versions and the commit of `folder`. Names no host and no user."""
    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "system": platform.system(),
        "kernel": platform.release().partition("-")[0],
        "machine": platform.machine(),
        "python": platform.python_version(),
        "versions": versions,
        "cpu": _cpu_name(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cpu_governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_average": os.getloadavg(),
        "gpus": [dict(zip(GPU_FIELDS, row, strict=True)) for row in _nvidia_smi("gpu", GPU_FIELDS) or ()],
        "commit": _git(folder, "rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git(folder, "status", "--porcelain", "--untracked-files=no")),
    }


class Watch:
    """Runs from `start` to `stop` beside one launch. `session` is the session id of its processes, once they exist."""

    def __init__(self, period_s: float = 1.0) -> None:
        self.period_s = period_s
        self.session: int | None = None
        self.clocks: list[float] = []
        self.reasons: set[str] = set()
        self.gpu_others: set[int] = set()
        self.has_gpu = shutil.which("nvidia-smi") is not None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)

    def start(self) -> None:
        if self.has_gpu:
            self.gpu_others |= set(_gpu_processes())  # here before us, so not ours
            self._thread.start()
        self.began, self.busy, self.own = time.monotonic(), _busy_seconds(), time.process_time()
        self.cpu_throttles = _cpu_throttles()

    def stop(self, launched_cpu_s: float) -> dict[str, Any]:
        """The facts of the launch, whose own processes used `launched_cpu_s` of CPU."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        seconds, busy = time.monotonic() - self.began, _busy_seconds()
        other = None
        if busy is not None and self.busy is not None:
            ours = launched_cpu_s + time.process_time() - self.own
            other = max(0.0, busy - self.busy - ours) / (seconds * (os.cpu_count() or 1))
        throttles = _cpu_throttles()
        if throttles is not None and self.cpu_throttles is not None and throttles > self.cpu_throttles:
            self.reasons.add("CPU thermal")
        return {
            "other_cpu_share": other,
            "load_average": os.getloadavg()[0],
            "throttled": sorted(self.reasons) if self.has_gpu or throttles is not None else None,
            "gpu_clock_mhz": statistics.median(self.clocks) if self.clocks else None,
            "other_gpu_processes": len(self.gpu_others) if self.has_gpu else None,
        }

    def _poll(self) -> None:
        while not self._ended.wait(self.period_s):
            events = _nvidia_smi("gpu", ("clocks.sm", "clocks_event_reasons.active")) or _nvidia_smi(
                "gpu", ("clocks.sm", "clocks_throttle_reasons.active")  # before driver 535
            )  # fmt: skip
            for clock, active in events or ():
                self.clocks.append(float(clock))
                bits = int(active, 16)
                self.reasons |= {name for bit, name in THROTTLES.items() if bits & bit}
            # In a container the driver may report process ids that mean nothing here: those are taken for ours.
            visible = {pid for pid in _gpu_processes() if Path(f"/proc/{pid}").exists()}
            self.gpu_others |= visible - session_processes(self.session)


def session_processes(session: int | None) -> set[int]:
    """Process ids of a session (what one launch started, with all its children)."""
    return {pid for pid, fields in _processes() if int(fields[3]) == session}


def session_cpu_seconds(session: int) -> float:
    """CPU time of a session's processes and of the children they have waited for."""
    return sum(sum(map(int, fields[11:15])) for _, fields in _processes() if int(fields[3]) == session) / TICKS


def start_time(pid: int) -> str | None:
    """When a process started, which with its id names it for good; None when it has ended."""
    if not PROC.is_dir():
        done = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True)
        return done.stdout.strip() or None
    return next((fields[19] for _, fields in _processes([pid])), None)


def _processes(pids: Iterable[int] | None = None) -> Iterable[tuple[int, list[str]]]:
    """(pid, the fields of /proc/pid/stat after the name) of each process that still runs."""
    if pids is None:
        pids = [int(entry.name) for entry in PROC.glob("[0-9]*")] if PROC.is_dir() else []
    for pid in pids:
        text = _read(f"/proc/{pid}/stat")
        fields = text.rpartition(")")[2].split() if text is not None else ["Z"]
        if fields[0] not in "ZX":  # ended, though perhaps nobody has taken note of it
            yield pid, fields


def _busy_seconds() -> float | None:
    """Time all CPUs spent working since boot: all but idle and waiting for I/O; guest time is part of user time."""
    text = _read("/proc/stat")
    if text is None:
        return None
    user, nice, system, _idle, _wait, irq, softirq, steal = map(int, text.split()[1:9])
    return (user + nice + system + irq + softirq + steal) / TICKS


def _cpu_throttles() -> int | None:
    counts = [
        _read(str(path)) for path in Path("/sys/devices/system/cpu").glob("cpu*/thermal_throttle/core_throttle_count")
    ]
    return sum(int(count) for count in counts if count) if counts else None


def _gpu_processes() -> list[int]:
    return [int(pid) for (pid,) in _nvidia_smi("compute-apps", ("pid",)) or ()]


def _nvidia_smi(what: str, fields: Iterable[str]) -> list[list[str]] | None:
    """Rows of an nvidia-smi query; None where there is none or it fails."""
    try:
        command = ["nvidia-smi", f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]


def _cpu_name() -> str | None:
    lines = (_read("/proc/cpuinfo") or "").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None
