"""What a report and the command line say, in words."""

from collections.abc import Mapping
from html import escape
from typing import Any

from deltagram.experiments.charts import percent, plain
from deltagram.experiments.plan import Arm, Cell, Plan


def headline(plan: Plan, result: Mapping[str, Any]) -> tuple[str, str, str]:
    """(tone, the verdict in a few words, what stands behind it)."""
    cells, aa = result["cells"], result["aa"]
    words = [cell["verdict"] for cell in cells.values()]
    blocks = (
        f"{result['looked_at']} of {plan.design.blocks} blocks, {4 * (result['looked_at'] or 0) * len(cells)} launches"
    )
    if "unfinished" in words:
        return (
            "unfinished",
            "No verdict yet",
            f"{result['state']} after {result['blocks']} of {plan.design.blocks} blocks",
        )
    if len(words) > 1:
        found = []
        for word in ("faster", "slower", "equivalent", "unresolved"):
            names = [name for name, cell in cells.items() if cell["verdict"] == word]
            where = " and ".join(names) if len(names) < 3 else f"{len(names)} cells"
            found += [f"{word} in {where}"] if names else []
        tone = words[0] if len(set(words)) == 1 else "mixed"
        return tone, f"{'A against itself' if aa else 'B'}: " + ", ".join(found), f"{len(words)} cells, {blocks}"
    (cell,) = cells.values()
    word, (low, high) = cell["verdict"], cell["interval"]
    interval = f"{level(cell)} interval {bound(low)} to {bound(high)}"
    if aa:
        word_of = {"equivalent": "A/A: no difference, as it should be", "unresolved": "A/A: no difference found"}
        text = word_of.get(word, f"A/A: arm A came out {word} than itself")
        return word, text, f"floor ±{plain_bound(cell['resolution'])}; {interval}; {blocks}"
    if word in ("faster", "slower"):
        note = ", less than the margin" if cell["below_margin"] else ""
        return word, f"B is {plain(cell['speedup'])} {word}{note}", f"{interval}; {blocks}"
    if word == "equivalent":
        return word, f"Equivalent within ±{plain(result['margin'])}", f"{interval}; {blocks}"
    return word, "Unresolved", f"resolution reached ±{plain_bound(cell['resolution'])}; {interval}; {blocks}"


def level(cell: Mapping[str, Any]) -> str:
    return f"{cell['level'] * 100:.4g} %"


def bound(value: float | None) -> str:
    """An end of an interval; an early look may have none."""
    return "unbounded" if value is None or value > 10.0 else percent(value)


def plain_bound(value: float | None) -> str:
    return "∞" if value is None or value > 10.0 else plain(value)


def number_name(cell: Cell) -> str:
    """What the one number of a launch is."""
    measure = cell.measure
    if measure.kind == "step":
        kind = "" if measure.steps == "all" else measure.steps + " "
        return f"median steady {kind}step, ms" + (" per token" if measure.per_token else "")
    if measure.kind == "load":
        stat, name, *unit = measure.number.split("_")
        return f"{stat} {name.upper()}, ms" if unit == ["ms"] else measure.number.replace("_", " ")
    return "number the command printed"


def arm_words(arm: Arm) -> str:
    """What an arm launches, as its plan says it."""
    at = f" at commit {arm.commit}" if arm.commit else ""
    if arm.command is not None:
        return " ".join(arm.command) + at
    settings = ", ".join(f"{key} = {value!r}" for key, value in arm.settings.items())
    return f"model {arm.model}" + (f" with {settings}" if settings else "") + at


def p_value(value: float | None) -> str:
    return "—" if value is None else f"{value:.3f}" if value >= 0.001 else "< 0.001"


def short(value: Any) -> str:
    return "—" if value is None else f"{value:.4g}" if isinstance(value, float) else escape(str(value))


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
