"""Runs an experiment: block after block, each letter a fresh launch, a look where the plan has one.

Everything that is known is on disk after each launch, so going on after an interruption is the same loop over a record
that is not empty: it launches what has no ok launch yet.
"""

import shutil
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from deltagram.experiments.arms import check_out
from deltagram.experiments.conclude import analyse, conclude, ok_launches, result_of
from deltagram.experiments.launch import broken_rules, end_leftovers, run_launch
from deltagram.experiments.plan import Arm, Plan
from deltagram.experiments.records import (
    FULL,
    DiskFullError,
    Record,
    create,
    floors,
    now,
    unfinished,
)
from deltagram.experiments.stats import PairedResult


class Progress(Protocol):
    """What a caller may show. left_s: seconds left at most, as far as launches have shown; None before the first."""

    def launching(self, what: str, done: int, total: int, left_s: float | None) -> None: ...

    def launched(self, launch: Mapping[str, Any]) -> None: ...

    def looked(self, blocks: int, planned: int, results: Mapping[str, PairedResult]) -> None: ...


@dataclass
class Outcome:
    record: Record
    result: dict[str, Any]


class Vetoed(Exception):
    """The A/A run of this plan says that this environment cannot answer its question."""


class _Failed(Exception):
    """More launches were thrown out than the plan allows."""


class _Ended(Exception):
    """SIGTERM: treated like ctrl-C."""


def compare(plan: Plan, out: Path, *, aa: bool = False, resume: bool = False, progress: Progress) -> Outcome:
    """Runs `plan` (arm A against itself with `aa`) in a record below `out`, or goes on with the latest one.

    Always returns with the record in a named state. Raises ValueError when there is nothing to resume or an arm's
    commit is unknown, Vetoed when the plan's own A/A run forbids the comparison.
    """
    arms = {"A": plan.arms["A"], "B": plan.arms["A"] if aa else plan.arms["B"]}
    problems = [] if aa else vetoes(floors(out, plan), plan.design.margin)
    if problems:
        problems.append("a wider margin, more blocks (a new plan) or a quieter machine, and --aa again, may lift it")
        raise Vetoed("; ".join(problems))
    out = out.resolve()  # arms run in folders of their own, and are told paths
    record = unfinished(out, plan, aa) if resume else create(out, plan, aa)
    record.set_state("running")
    try:
        with _sigterm_as_exception():
            _Experiment(plan, arms, record, progress).run()
            record.set_state("done")
    except (KeyboardInterrupt, _Ended):
        record.set_state("interrupted", "stopped from outside")
    except _Failed as error:
        record.set_state("failed", str(error))
    except DiskFullError as error:
        record.set_state("disk-full", str(error))
    except BaseException as error:
        record.set_state("failed", f"{type(error).__name__}: {error}")
        raise
    try:
        return Outcome(record, conclude(plan, record))
    except OSError as error:
        if error.errno not in FULL:
            raise
        record.set_state("disk-full", f"no room for the result: {error.strerror}")
        return Outcome(record, result_of(plan, record))


def vetoes(floor: Sequence[Mapping[str, Any]], margin: float) -> list[str]:
    """Why the latest A/A run forbids a comparison; [] when it does not or there is none."""
    problems = []
    for name, cell in floor[-1]["cells"].items() if floor else ():
        where = f"{floor[-1]['record']}, cell {name}"
        if cell["verdict"] in ("faster", "slower"):
            problems.append(f"{where}: arm A came out {cell['verdict']} than itself")
        elif cell["resolution"] is None or cell["resolution"] > margin:
            problems.append(
                f"{where}: it resolves {cell['resolution'] or 0.0:.2%}, wider than the margin of {margin:.2%}"
            )
    return problems


class _Experiment:
    def __init__(self, plan: Plan, arms: Mapping[str, Arm], record: Record, progress: Progress) -> None:
        self.plan, self.arms, self.record, self.progress = plan, arms, record, progress
        self.launches = record.launches()
        self.orders = record.experiment["orders"]
        self.thrown_out = 0  # since this run began, so that a failed experiment can be resumed
        trees = record.folder / "trees"
        self.trees = {
            key: check_out(arm.commit, plan.folder, trees) if arm.commit else None for key, arm in arms.items()
        }
        for launch in self.launches:
            if "started" not in launch:  # cut off by a crash, which may have left its processes running
                end_leftovers(record.folder / "launches" / launch["folder"])
                launch["started"] = now()
                record.write_launch(launch)

    def run(self) -> None:
        for block in range(self.plan.design.blocks):
            for cell in self.plan.cells:
                self._block(block, cell.name)
            done = block + 1
            if done in self.plan.design.looks:
                results = analyse(self.plan, self.launches, done)
                self.progress.looked(done, self.plan.design.blocks, results)
                if all(result.verdict != "unresolved" for result in results.values()):
                    return

    def _block(self, block: int, cell: str) -> None:
        order = self.orders[block][cell]
        position = 0
        while position < len(order):
            done = ok_launches(self.launches, block, cell)
            if position in done:
                position += 1
                continue
            if self._too_long_ago(done.values()):
                position = 0
                continue
            self._launch(block, position, order[position], cell)

    def _too_long_ago(self, done: Any) -> bool:
        """A block whose launches lie too far apart is begun again: its two halves saw different machines."""
        ended = [launch["ended"] for launch in done]
        if not ended or time.time() - max(ended) <= self.plan.rules.max_gap_s:
            return False
        for launch in done:
            launch |= {"state": "invalid", "rule": "max_gap_s"}
            launch["reason"] = f"its block was interrupted for longer than {self.plan.rules.max_gap_s:g} s"
            self.record.write_launch(launch)
        return True

    def _launch(self, block: int, position: int, letter: str, cell_name: str) -> None:
        cell = next(cell for cell in self.plan.cells if cell.name == cell_name)
        done, total = self._count()
        what = f"block {block + 1}/{self.plan.design.blocks}, {cell.name}, launch {position + 1} of 4: {letter}"
        self.progress.launching(what, done, total, self._left_s(total - done))
        self.record.probe_disk()
        folder = self.record.new_launch_folder(block, position, letter, cell.name)
        prompts = self.record.folder / f"prompts-{cell.name}.jsonl" if cell.manifest else None
        launch: dict[str, Any] = {
            "folder": folder.name,
            "number": int(folder.name.split("-")[0]),
            "cell": cell.name,
            "block": block,
            "position": position,
            "arm": letter,
        }
        try:
            try:
                launch |= run_launch(self.arms[letter], cell, folder, prompts, self.trees[letter])
            except (KeyboardInterrupt, _Ended):
                launch |= {"state": "interrupted", "reason": "stopped from outside", "started": now()}
                self._keep(launch)
                raise
            if launch["state"] == "ok":
                self._judge(launch)
            else:
                self.record.probe_disk()  # a full disk looks like many things
            self._keep(launch)
        except (OSError, DiskFullError) as error:
            if isinstance(error, OSError) and error.errno not in FULL:
                raise
            shutil.rmtree(folder)
            raise DiskFullError(f"no room for launch {folder.name}: {error}") from None
        self.progress.launched(launch)
        if launch["state"] != "ok":
            self.thrown_out += 1
            if self.thrown_out > self.plan.design.retries:
                raise _Failed(
                    f"{self.thrown_out} launches were thrown out, {self.plan.design.retries} may be; the last one "
                    f"({folder.name}) was {launch['state']}: {launch['reason']}"
                )

    def _judge(self, launch: dict[str, Any]) -> None:
        rules = self.plan.rules
        same_arm = rules.output_digest == "per-arm"
        reference = next(
            (
                earlier["facts"]["digests"]
                for earlier in self.launches
                if earlier["state"] == "ok"
                and earlier["cell"] == launch["cell"]
                and earlier["facts"].get("digests")
                and (not same_arm or earlier["arm"] == launch["arm"])
            ),
            None,
        )
        broken = broken_rules(launch["facts"], rules, reference)
        if broken:
            launch |= {"state": "invalid", "rule": broken[0][0], "reason": "; ".join(found for _, found in broken)}

    def _keep(self, launch: dict[str, Any]) -> None:
        self.record.write_launch(launch)
        self.launches.append(launch)

    def _count(self) -> tuple[int, int]:
        total = 4 * self.plan.design.blocks * len(self.plan.cells)
        return sum(launch["state"] == "ok" for launch in self.launches), total

    def _left_s(self, launches: int) -> float | None:
        seconds = [launch["seconds"] for launch in self.launches if launch["state"] == "ok"]
        return launches * sum(seconds) / len(seconds) if seconds else None


@contextmanager
def _sigterm_as_exception() -> Iterator[None]:
    def ended(*_: Any) -> None:
        raise _Ended

    previous = signal.signal(signal.SIGTERM, ended)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
