"""Blocks from a CSV file, for numbers that others measured.

Long form: columns `block`, `arm` (A or B), `value` and optionally `cell`, a row per launch. Wide form: columns `A`, `B`
and optionally `cell`, a row per block.
"""

import csv
from collections.abc import Mapping
from pathlib import Path

from deltagram.experiments.stats import Block


def read_blocks(path: Path) -> dict[str, list[Block]]:
    """Blocks by cell, in the order of the file. Raises ValueError with every problem of it."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            rows, columns = list(reader), set(reader.fieldnames or ())
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}") from None
    problems: list[str] = []
    if {"block", "arm", "value"} <= columns:
        cells = _long(rows, problems)
    elif {"A", "B"} <= columns:
        cells = _wide(rows, problems)
    else:
        raise ValueError(
            f"{path.name} has the columns {', '.join(sorted(columns)) or 'none'}; expected block, arm, value "
            "(a row per launch) or A, B (a row per block), and optionally cell"
        )
    if not rows:
        problems.append("it holds no rows")
    if problems:
        raise ValueError(f"cannot read {path.name}:\n  " + "\n  ".join(problems))
    return cells


def _long(rows: list[dict[str, str]], problems: list[str]) -> dict[str, list[Block]]:
    gathered: dict[str, dict[str, dict[str, list[float]]]] = {}
    for line, row in enumerate(rows, 2):
        arm, value = (row["arm"] or "").strip(), _number(row["value"], line, "value", problems)
        if arm not in ("A", "B"):
            problems.append(f"line {line}: arm is {arm!r}; expected A or B")
        elif value is not None:
            block = gathered.setdefault(_cell(row), {}).setdefault((row["block"] or "").strip(), {"A": [], "B": []})
            block[arm].append(value)
    for name, blocks in gathered.items():
        for label, arms in blocks.items():
            if not arms["A"] or not arms["B"]:
                problems.append(f"cell {name!r}, block {label!r} has {len(arms['A'])} of A and {len(arms['B'])} of B")
    return {name: [(arms["A"], arms["B"]) for arms in blocks.values()] for name, blocks in gathered.items()}


def _wide(rows: list[dict[str, str]], problems: list[str]) -> dict[str, list[Block]]:
    cells: dict[str, list[Block]] = {}
    for line, row in enumerate(rows, 2):
        a, b = (_number(row[arm], line, arm, problems) for arm in "AB")
        if a is not None and b is not None:
            cells.setdefault(_cell(row), []).append((a, b))
    return cells


def _cell(row: Mapping[str, str]) -> str:
    return (row.get("cell") or "all").strip()


def _number(text: str | None, line: int, column: str, problems: list[str]) -> float | None:
    try:
        return float(text or "")
    except ValueError:
        problems.append(f"line {line}: {column} is {text!r}; expected a number")
        return None
