"""The record of an experiment: one folder that is whole after every launch, whatever ends the process.

    plan.toml            the plan as it was read
    experiment.json      hash, orders, arms, prompt hashes, environment: written once
    state.json           running, done, interrupted, failed or disk-full, and why
    prompts-CELL.jsonl   the prompt manifest of each cell that has one
    launches/0001-.../   one folder per launch: its output, its raw data, and launch.json, written last
    result.json, report.html

Files appear whole or not at all: written beside, synced, renamed. state.json is written in place over its own padding,
so that it can still be told that the disk is full. A launch folder without launch.json was cut off by a crash.
"""

import errno
import json
import os
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from deltagram.experiments.environment import capture, start_time
from deltagram.experiments.plan import Plan

STATES = ("running", "done", "interrupted", "failed", "disk-full")
FULL = (errno.ENOSPC, errno.EDQUOT)
_STATE_BYTES = 4096
_PROBE_BYTES = 1 << 16


class DiskFullError(Exception):
    """There is no room for the next launch."""


class Record:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.experiment: dict[str, Any] = json.loads((folder / "experiment.json").read_text())

    @property
    def state(self) -> dict[str, Any]:
        """`state`, and why. A state "running" whose process is gone is a crash."""
        state: dict[str, Any] = json.loads((self.folder / "state.json").read_text())
        if state["state"] == "running" and start_time(state["pid"]) != state["process_start"]:
            state |= {"state": "crashed", "reason": "the process that ran it is gone"}
        return state

    def set_state(self, state: str, reason: str = "") -> None:
        assert state in STATES
        row = {"state": state, "reason": reason[:1500], "pid": os.getpid(), "process_start": start_time(os.getpid())}
        row["updated"] = now()
        text = json.dumps(row).encode()
        with open(self.folder / "state.json", "r+b") as file:
            file.write(text.ljust(_STATE_BYTES))
            file.flush()
            os.fsync(file.fileno())

    def launches(self) -> list[dict[str, Any]]:
        """Every launch in the order they ran. One that a crash cut off is listed as interrupted."""
        rows = []
        for folder in sorted((self.folder / "launches").iterdir()):
            file = folder / "launch.json"
            if file.exists():
                rows.append(json.loads(file.read_text()))
            else:
                number, block, letter, cell = folder.name.split("-", 3)
                rows.append(
                    {
                        "folder": folder.name,
                        "number": int(number),
                        "cell": cell,
                        "block": int(block[1:]),
                        "position": int(letter[0]),
                        "arm": letter[1],
                        "state": "interrupted",
                        "reason": "cut off before it was recorded",
                    }
                )
        return rows

    def new_launch_folder(self, block: int, position: int, arm: str, cell: str) -> Path:
        number = len(list((self.folder / "launches").iterdir())) + 1
        folder = self.folder / "launches" / f"{number:04d}-b{block}-{position}{arm}-{cell}"
        folder.mkdir()
        return folder

    def write_launch(self, launch: Mapping[str, Any]) -> None:
        write_json(self.folder / "launches" / launch["folder"] / "launch.json", launch)

    def probe_disk(self) -> None:
        """Raises DiskFullError unless a launch's records would fit."""
        file = self.folder / ".room"
        try:
            write_bytes(file, b"\0" * _PROBE_BYTES)
        except OSError as error:
            if error.errno in FULL:
                raise DiskFullError(f"no room in {self.folder.name}: {error.strerror}") from None
            raise
        finally:
            file.unlink(missing_ok=True)


def create(out: Path, plan: Plan, aa: bool) -> Record:
    """A fresh record `out/NAME-001` (NAME-aa-001 for an A/A), numbered on."""
    out.mkdir(parents=True, exist_ok=True)
    stem = plan.name + ("-aa" if aa else "")
    number = 1 + max((int(path.name.rpartition("-")[2]) for path in _siblings(out, stem)), default=0)
    folder = out / f"{stem}-{number:03d}"
    (folder / "launches").mkdir(parents=True)
    write_bytes(folder / "plan.toml", plan.source.encode())
    for cell in plan.cells:
        if cell.manifest is not None:
            write_bytes(folder / f"prompts-{cell.name}.jsonl", cell.manifest.lines().encode())
    write_bytes(folder / "state.json", b"{}".ljust(_STATE_BYTES))
    experiment = {
        "name": plan.name,
        "plan_sha256": plan.sha256,
        "aa": aa,
        "created": now(),
        "orders": plan.orders(),
        "prompts_sha256": {cell.name: cell.manifest.sha256 for cell in plan.cells if cell.manifest},
        "environment": capture(plan.folder),
        "floor": [] if aa else floors(out, plan),
    }
    write_json(folder / "experiment.json", experiment)
    return Record(folder)


def unfinished(out: Path, plan: Plan, aa: bool) -> Record:
    """The latest record of this plan that can be gone on with. Raises ValueError when there is none."""
    reasons = []
    for folder in reversed(_siblings(out, plan.name + ("-aa" if aa else ""))):
        if not (folder / "experiment.json").exists():
            reasons.append(f"{folder.name} was cut off before its first launch")
            continue
        record = Record(folder)
        state = record.state["state"]
        if record.experiment["plan_sha256"] != plan.sha256:
            reasons.append(f"{folder.name} is of another version of the plan, which may not change once it has begun")
        elif state == "done":
            reasons.append(f"{folder.name} is done")
        elif state == "running":
            reasons.append(f"{folder.name} is still running (process {record.state['pid']})")
        else:
            return record
    raise ValueError("nothing to resume: " + ("; ".join(reasons) or f"no record of {plan.name} in {out}"))


def floors(out: Path, plan: Plan) -> list[dict[str, Any]]:
    """The finished A/A runs of this very plan, oldest first: what the environment does to two equal arms."""
    found = []
    for folder in _siblings(out, plan.name + "-aa"):
        result = folder / "result.json"
        if result.exists():
            row = json.loads(result.read_text())
            if row["plan_sha256"] == plan.sha256 and row["state"] == "done":
                found.append({"record": folder.name, "finished": row["finished"], "cells": row["cells"]})
    return found


def write_json(path: Path, value: Any) -> None:
    write_bytes(path, (json.dumps(finite(value), indent=1, ensure_ascii=False) + "\n").encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Writes the file whole or not at all."""
    beside = path.with_name(path.name + ".part")
    try:
        with open(beside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def finite(value: Any) -> Any:
    """JSON has no infinity and no NaN: None."""
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, Mapping):
        return {key: finite(entry) for key, entry in value.items()}
    return [finite(entry) for entry in value] if isinstance(value, list | tuple) else value


def now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


def _siblings(out: Path, stem: str) -> list[Path]:
    def numbered(path: Path) -> bool:
        name, _, number = path.name.rpartition("-")
        return name == stem and number.isdigit()

    return sorted(path for path in out.glob(f"{stem}-*") if numbered(path)) if out.is_dir() else []
