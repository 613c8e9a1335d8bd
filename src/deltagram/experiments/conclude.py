"""From the launches of a record to its result: whole blocks, the planned look they reach, verdicts, files."""

from collections.abc import Mapping, Sequence
from typing import Any

from deltagram.experiments.plan import Plan
from deltagram.experiments.records import Record, now, write_bytes, write_json
from deltagram.experiments.report import report
from deltagram.experiments.stats import Block, PairedResult, detectable, fraction, half_width, paired_tests


def ok_launches(launches: Sequence[dict[str, Any]], block: int, cell: str) -> dict[int, dict[str, Any]]:
    """The launches that count of one block, by position."""
    return {
        launch["position"]: launch
        for launch in launches
        if launch["state"] == "ok" and launch["block"] == block and launch["cell"] == cell
    }


def whole_blocks(plan: Plan, launches: Sequence[dict[str, Any]]) -> int:
    """How many blocks from the first on are complete in every cell."""
    count = 0
    while count < plan.design.blocks and all(len(ok_launches(launches, count, cell.name)) == 4 for cell in plan.cells):
        count += 1
    return count


def analyse(plan: Plan, launches: Sequence[dict[str, Any]], blocks: int) -> dict[str, PairedResult]:
    """The paired tests over the first `blocks` blocks, which must be a planned look."""
    design, cells = plan.design, dict[str, list[Block]]()
    for cell in plan.cells:
        sign = 1 if cell.measure.better == "lower" else -1  # Holm is over all cells, whichever way each is better
        rows: list[Block] = []
        for block in range(blocks):
            done = ok_launches(launches, block, cell.name).values()
            numbers = {arm: [one["number"] ** sign for one in done if one["arm"] == arm] for arm in "AB"}
            rows.append((numbers["A"], numbers["B"]))
        cells[cell.name] = rows
    return paired_tests(cells, design.margin, alpha=design.alpha, looks=design.looks, spending=design.spending)


def conclude(plan: Plan, record: Record) -> dict[str, Any]:
    """Writes result.json, results.csv and report.html from what the record holds; returns the result."""
    launches, result = record.launches(), result_of(plan, record)
    write_json(record.folder / "result.json", result)
    write_bytes(record.folder / "results.csv", _csv(launches).encode())
    page = report(plan, record.experiment, result, launches)
    write_bytes(record.folder / "report.html", page.encode())
    return result


def result_of(plan: Plan, record: Record) -> dict[str, Any]:
    """What result.json says: the state, and each cell's verdict at the last look that was reached."""
    launches, state = record.launches(), record.state
    blocks = whole_blocks(plan, launches)
    look = max((n for n in plan.design.looks if n <= blocks), default=None)
    results = analyse(plan, launches, look) if look is not None else {}
    return {
        "name": plan.name,
        "aa": record.experiment["aa"],
        "state": state["state"],
        "reason": state["reason"],
        "finished": now(),
        "plan_sha256": plan.sha256,
        "prompts_sha256": record.experiment["prompts_sha256"],
        "margin": plan.design.margin,
        "blocks": blocks,
        "looked_at": look,
        "cells": {cell.name: cell_row(results.get(cell.name), plan.design.blocks) for cell in plan.cells},
        "thrown_out": [
            {key: launch.get(key) for key in ("folder", "cell", "block", "arm", "state", "rule", "reason")}
            for launch in launches
            if launch["state"] != "ok"
        ],
        "floor": record.experiment["floor"],
    }


def cell_row(result: PairedResult | None, planned: int) -> dict[str, Any]:
    """One cell of result.json. Effects are fractions: 0.02 says B is 2 % faster."""
    if result is None:
        return {"verdict": "unfinished", "resolution": None}
    difference, equivalence = result.blocks_to_tell()
    level = result.level
    return {
        "verdict": result.verdict,
        "speedup": result.speedup,
        "interval": list(result.interval),
        "level": 1.0 - level,
        "resolution": result.resolution,
        "p_value": result.p_value,
        "sign_flip_p_value": result.sign_flip_p_value,
        "below_margin": result.below_margin,
        "blocks": result.blocks,
        "block_sd": result.block_sd,
        "detectable_at_80_percent_power": result.detectable,
        "power_at_margin": result.power_at_margin,
        "resolution_at_the_planned_blocks": fraction(half_width(planned, result.block_sd, level)),
        "detectable_at_the_planned_blocks": fraction(detectable(planned, result.block_sd, level)),
        "blocks_to_show_a_difference": difference,
        "blocks_to_show_equivalence": equivalence,
        "log_ratios": list(result.log_ratios),
    }


def _csv(launches: Sequence[Mapping[str, Any]]) -> str:
    rows = [f"{one['cell']},{one['block']},{one['arm']},{one['number']!r}" for one in launches if one["state"] == "ok"]
    return "cell,block,arm,value\n" + "".join(row + "\n" for row in rows)
