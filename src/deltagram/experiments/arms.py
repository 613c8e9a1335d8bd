"""From an arm of a plan to the command that launches it."""

import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deltagram.experiments import run_model
from deltagram.experiments.plan import Arm, Cell, fill

SHIPPED = "demo"  # the model that comes with the package


def arm_command(arm: Arm, cell: Cell, folder: Path, values: Mapping[str, str]) -> tuple[list[str], str | None]:
    """(command, URL of the readiness probe) of one launch. `values` fills the {placeholders}."""
    ready = fill([arm.ready_url], values)[0] if arm.ready_url is not None else None
    if arm.command is not None:
        return fill(arm.command, values), ready
    assert arm.model is not None
    model = _model_path(fill([arm.model], values)[0], arm.folder)
    settings = {
        key: fill([value], values)[0] if isinstance(value, str) else value for key, value in arm.settings.items()
    }
    if cell.measure.kind == "load":
        # Through the import system instead of the console script, so that an arm of another commit serves that commit.
        serve = [sys.executable, "-c", "from deltagram.cli import main; main()", "serve", "--port", values["port"]]
        command = serve + ([] if model == SHIPPED else [model]) + _flags(settings)
        return command, ready or f"http://127.0.0.1:{values['port']}/health"
    spec = {"model": model, "settings": settings, "prompts": values["prompts"], "trace": values["trace"]}
    file = folder / "model.json"
    file.write_text(json.dumps(spec))
    # By its path, so that an arm of another commit runs this launcher on that commit's engine.
    return [sys.executable, str(run_model.__file__), str(file)], ready


def check_out(commit: str, folder: Path, into: Path) -> Path:
    """The tree of `commit` of the repository around `folder`, unpacked below `into`. ValueError when there is none."""
    done = subprocess.run(
        ["git", "rev-parse", "--verify", f"{commit}^{{commit}}"], cwd=folder, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise ValueError(f"commit is {commit!r}, which the repository around the plan does not know")
    sha = done.stdout.strip()
    tree = into / sha[:12]
    if not tree.exists():
        top = subprocess.run(
            ["git", "rev-parse", "--show-toplevel"], cwd=folder, capture_output=True, text=True, check=True
        )
        archive = subprocess.run(
            ["git", "archive", sha], cwd=top.stdout.strip(), capture_output=True, check=True
        ).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(tree, filter="data")
    return tree


def _model_path(model: str, folder: Path) -> str:
    """A folder beside the plan where there is one; otherwise a name that the engine resolves."""
    return str(folder / model) if (folder / model).is_dir() else model


def _flags(settings: Mapping[str, Any]) -> list[str]:
    """Settings as the command line takes them."""
    flags = []
    for key, value in settings.items():
        text = value if isinstance(value, str) else json.dumps(value)
        flags += [f"--{key}", text] if key in ("device", "dtype") else ["--set", f"{key}={text}"]
    return flags
