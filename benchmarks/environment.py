"""What a result file says about where it was measured, and how it is written."""

import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def environment() -> dict[str, Any]:
    """Machine, versions, commit and command of this process."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=RESULTS.parent)
    found: dict[str, Any] = {
        "gpu": gpu,
        "cpu": _cpu(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit.stdout.strip() or None,
        "command": " ".join(["python", *sys.argv]),
    }
    for name in ("transformers", "triton"):
        try:
            found[name] = __import__(name).__version__
        except ImportError:
            found[name] = None
    return found


def save(name: str, results: Any) -> Path:
    """Write results/NAME.json with the environment beside the results."""
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"environment": environment(), "results": results}, indent=1) + "\n")
    return path


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.is_file() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
