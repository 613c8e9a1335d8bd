"""The plots of a report: inline SVG whose x is in percent, so that they fill any width and text keeps its size."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10
from typing import Any

ROW = 26  # pixels of one row
THIN = 18


@dataclass(frozen=True)
class Scale:
    """Values low..high over 3..97 percent of the width."""

    low: float
    high: float

    def x(self, value: float) -> float:
        return 3.0 + 94.0 * (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)

    def ticks(self, most: int = 6) -> list[float]:
        rough = (self.high - self.low) / most
        power = 10.0 ** floor(log10(rough))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
        first = ceil(self.low / step - 1e-9)
        return [index * step for index in range(first, floor(self.high / step + 1e-9) + 1)]


def effect_scale(values: Sequence[float], margin: float) -> Scale:
    """Around 0, wide enough for all `values` (fractions) and the margin."""
    most = 1.15 * max(margin, *(abs(value) for value in values))
    return Scale(-most, most)


def percent(value: float, digits: int = 1) -> str:
    """A signed percentage, with more digits where rounding would leave nothing of it."""
    while digits < 4 and value != 0.0 and abs(value) * 100 < 2 * 10.0**-digits:
        digits += 1
    return f"{value * 100:+.{digits}f} %".replace("-", "−")


def plain(value: float, digits: int = 1) -> str:
    """A percentage without its sign."""
    return percent(abs(value), digits).lstrip("+")


def axis(scale: Scale, label: str, *, effects: bool) -> str:
    """Tick labels below a plot."""
    marks = []
    for tick in scale.ticks():
        text = f"{tick * 100:+.3g}".replace("-", "−") if effects and abs(tick) > 1e-12 else f"{round(tick, 12):.4g}"
        marks.append(f'<span style="left:{scale.x(tick):.2f}%">{text}</span>')
    return f'<div class="axis">{"".join(marks)}</div><p class="axis-label">{escape(label)}</p>'


def _grid(scale: Scale, height: int, margin: float | None = None) -> str:
    parts = []
    if margin is not None:
        left, right = scale.x(-margin), scale.x(margin)
        parts.append(f'<rect class="margin" x="{left:.2f}%" y="0" width="{right - left:.2f}%" height="{height}"/>')
    for tick in scale.ticks():
        kind = "zero" if margin is not None and abs(tick) < 1e-12 else "tick"
        parts.append(_line(kind, scale.x(tick), 0, height))
    return "".join(parts)


def _line(kind: str, x: float, top: float, bottom: float) -> str:
    return f'<line class="{kind}" x1="{x:.2f}%" x2="{x:.2f}%" y1="{top:g}" y2="{bottom:g}"/>'


def _plot(labels: Sequence[str], body: str, row: int, below: str, name: str) -> str:
    height = row * len(labels)
    names = "".join(f'<div style="height:{row}px">{label}</div>' for label in labels)
    svg = f'<svg height="{height}" role="img" aria-label="{escape(name)}">{body}</svg>'
    return f'<div class="plot"><div class="names">{names}</div><div class="field">{svg}{below}</div></div>'


def interval_plot(rows: Sequence[Mapping[str, Any]], margin: float, label: str) -> str:
    """One interval per cell. rows: {"name", "speedup", "interval", "verdict"}, effects as fractions."""
    scale = effect_scale([end for row in rows for end in row["interval"]], margin)
    body = [_grid(scale, ROW * len(rows), margin)]
    for index, row in enumerate(rows):
        y = ROW * (index + 0.5)
        low, high = (scale.x(end) for end in row["interval"])
        ends = " to ".join(percent(end) for end in row["interval"])
        words = f"{row['name']}: {percent(row['speedup'])}, interval {ends}"
        body.append(
            f'<g class="{row["verdict"]}"><title>{escape(words)}</title>'
            f'<line class="interval" x1="{low:.2f}%" x2="{high:.2f}%" y1="{y}" y2="{y}"/>'
            + _line("interval", low, y - 5, y + 5) + _line("interval", high, y - 5, y + 5)
            + f'<circle class="mean" cx="{scale.x(row["speedup"]):.2f}%" cy="{y}" r="5.5"/></g>'
        )  # fmt: skip
    names = [f"<b>{escape(row['name'])}</b>" for row in rows]
    return _plot(names, "".join(body), ROW, axis(scale, label, effects=True), "interval of each cell")


def block_plot(
    blocks: Sequence[Mapping[str, Any]], margin: float, mean: float, interval: tuple[float, float], label: str
) -> str:
    """One dot per block. blocks: {"block", "order", "effect"}; mean and interval over all of them."""
    scale = effect_scale([*interval, *(block["effect"] for block in blocks)], margin)
    height = THIN * len(blocks)
    low, high = (scale.x(end) for end in interval)
    body = [_grid(scale, height, margin)]
    body.append(f'<rect class="over" x="{low:.2f}%" y="0" width="{high - low:.2f}%" height="{height}"/>')
    body.append(_line("mean-line", scale.x(mean), 0, height))
    for index, block in enumerate(blocks):
        words = f"block {block['block'] + 1} ({block['order']}): {percent(block['effect'], 2)}"
        body.append(
            f'<circle class="block" cx="{scale.x(block["effect"]):.2f}%" cy="{THIN * (index + 0.5)}" r="4.5">'
            f"<title>{escape(words)}</title></circle>"
        )
    names = [f"{block['block'] + 1} <small>{block['order']}</small>" for block in blocks]
    return _plot(names, "".join(body), THIN, axis(scale, label, effects=True), "effect of each block")


def launch_plot(launches: Sequence[Mapping[str, Any]], label: str) -> str:
    """One row per launch in the order they ran: 5 % to 95 % and quartiles of its steps, and the number that counts."""
    ends = [value for one in launches for value in (_middle(one["quantiles"]) if one["quantiles"] else [one["number"]])]
    pad = 0.04 * (max(ends) - min(ends)) or 0.05 * max(ends)
    scale = Scale(min(ends) - pad, max(ends) + pad)
    body = [_grid(scale, THIN * len(launches))]
    for index, one in enumerate(launches):
        y = THIN * (index + 0.5)
        words = f"block {one['block'] + 1}, arm {one['arm']}: {one['number']:.5g}"
        marks = [f"<title>{escape(words)}</title>"]
        if one["quantiles"]:
            p5, p25, p75, p95 = (scale.x(value) for value in _middle(one["quantiles"]))
            marks.append(f'<line class="whisker" x1="{p5:.2f}%" x2="{p95:.2f}%" y1="{y}" y2="{y}"/>')
            marks.append(f'<rect class="box" x="{p25:.2f}%" width="{p75 - p25:.2f}%" y="{y - 4}" height="8" rx="2"/>')
        marks.append(_line("number", scale.x(one["number"]), y - 6, y + 6))
        body.append(f'<g class="arm-{one["arm"]}">{"".join(marks)}</g>')
    names = [
        f'{one["block"] + 1} <span class="arm-{one["arm"]} letter">{one["arm"]}</span>' for one in launches
    ]  # fmt: skip
    return _plot(names, "".join(body), THIN, axis(scale, label, effects=False), "distribution of each launch")


def _middle(quantiles: Sequence[float]) -> tuple[float, float, float, float]:
    """5, 25, 75 and 95 percent of measure.QUANTILES."""
    _, p5, p25, _, p75, p95, _ = quantiles
    return p5, p25, p75, p95
