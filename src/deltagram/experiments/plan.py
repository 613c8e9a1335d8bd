"""plan.toml: everything an experiment decides before its first launch, validated at once.

docs/experiments.md explains every key. Paths in a plan are relative to its folder. A plan that exists is valid:
problems are collected over the whole file and raised as one ValueError.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deltagram.experiments.load import Load
from deltagram.experiments.workload import Manifest

MEASURES = ("step", "load", "command")
STEP_KINDS = ("decode", "prefill", "mixed", "all")
DIGESTS = ("equal", "per-arm", "ignore")
BUILT_IN = ("port", "launch", "trace", "prompts", "python")  # what a {placeholder} may name beside a cell's own values
ORDERS = ("ABBA", "BAAB")


@dataclass(frozen=True)
class Design:
    margin: float  # smallest relative difference that matters
    blocks: int
    looks: tuple[int, ...]  # block counts at which the data are looked at; the last is `blocks`
    alpha: float
    spending: str
    seed: int  # of the block orders
    retries: int  # launches that may be thrown out before the experiment ends as failed


@dataclass(frozen=True)
class Arm:
    label: str
    command: tuple[str, ...] | None  # with {placeholders}; None where `model` is given
    model: str | None
    settings: Mapping[str, Any]
    commit: str | None  # run from the tree of this commit
    folder: Path  # working directory
    environment: Mapping[str, str]
    ready_url: str | None
    ready_output: str | None  # regular expression in the output of the arm
    ready_timeout_s: float

    @property
    def stays_up(self) -> bool:
        """A server that is measured while it runs, as opposed to a command that runs to its end."""
        return self.ready_url is not None or self.ready_output is not None


@dataclass(frozen=True)
class Measure:
    kind: str  # step, load or command
    better: str  # lower or higher
    number: str  # step: the steady median; load: a key of the summary; command: regular expression or dotted JSON path
    number_from: str  # "trace", "summary", "regex" or "json"
    timeout_s: float
    command: tuple[str, ...] | None  # what measures an arm that stays up
    digest: str | None  # command: regular expression whose group is the digest of the output
    steps: str  # step: kind of step that counts
    warmup: int  # step: steps dropped before the steady-state rule looks
    per_token: bool  # step: milliseconds per token of the step, for steps that differ in size
    load: Load | None  # load: how requests arrive


@dataclass(frozen=True)
class Rules:
    """What throws a launch out. None: not asked for."""

    output_digest: str
    output_lengths: bool
    max_failed_share: float
    max_cache_hit_share: float | None
    client_late: bool
    throttled: bool
    other_gpu_process: bool
    max_other_cpu_share: float | None
    max_drift: float | None
    min_steps: int
    max_gap_s: float


@dataclass(frozen=True)
class Cell:
    name: str
    values: Mapping[str, str]  # for {placeholders}
    measure: Measure
    manifest: Manifest | None


@dataclass(frozen=True)
class Plan:
    name: str
    question: str
    design: Design
    arms: Mapping[str, Arm]  # "A" and "B"
    cells: tuple[Cell, ...]
    rules: Rules
    source: str  # the text of plan.toml
    folder: Path

    @property
    def sha256(self) -> str:
        """Over the text of the plan and the manifests it names: equal hashes are the same experiment."""
        parts = [self.source, *(cell.manifest.sha256 for cell in self.cells if cell.manifest)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def orders(self) -> list[dict[str, str]]:
        """ABBA or BAAB at random for each block and cell; a function of the seed, fixed before the first launch."""
        draws = np.random.default_rng(self.design.seed).integers(0, 2, (self.design.blocks, len(self.cells)))
        return [{cell.name: ORDERS[draw] for cell, draw in zip(self.cells, row, strict=True)} for row in draws]


def fill(words: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """A command with its {placeholders} replaced; other braces stay."""
    return [re.sub(r"\{([a-z_]+)\}", lambda match: values.get(match[1], match[0]), word) for word in words]
