"""report.html: one self-contained page, the verdict first. No script, no font, no image from anywhere."""

from collections.abc import Mapping, Sequence
from html import escape
from math import log, sqrt
from pathlib import Path
from typing import Any

from scipy.stats import t as student

from deltagram.experiments.charts import block_plot, interval_plot, launch_plot, percent, plain
from deltagram.experiments.plan import Cell, Plan
from deltagram.experiments.stats import fraction
from deltagram.experiments.words import (
    arm_words,
    bound,
    duration,
    headline,
    level,
    number_name,
    p_value,
    plain_bound,
    short,
)

STYLE = Path(__file__).with_name("report.css").read_text()


def report(
    plan: Plan, experiment: Mapping[str, Any], result: Mapping[str, Any], launches: Sequence[Mapping[str, Any]]
) -> str:
    """The page. result: as in result.json; launches: every launch.json."""
    aa = result["aa"]
    body = [_verdict(plan, result), _cells(plan, result)]
    for cell in plan.cells:
        row = result["cells"][cell.name]
        ok = [launch for launch in launches if launch["state"] == "ok" and launch["cell"] == cell.name]
        if row["verdict"] == "unresolved":
            body.append(_to_resolve(plan, cell, row, ok))
        if row["verdict"] != "unfinished":
            body.append(_blocks(plan, cell, row, experiment))
        if ok:
            body.append(_launches(plan, cell, ok))
    body += [
        _floor(plan, result),
        _thrown_out(result),
        _method(plan, experiment, result, launches),
        _environment(experiment),
    ]
    title = f"{plan.name}{' (A/A)' if aa else ''}: {headline(plan, result)[1]}"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>{''.join(body)}</main></body></html>\n"
    )


def _section(title: str, *parts: str, kind: str = "") -> str:
    head = f"<h2>{escape(title)}</h2>" if title else ""
    return f'<section class="{kind}">{head}{"".join(parts)}</section>'


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], stack: bool = True) -> str:
    """A column whose name starts with # holds numbers; cells are HTML. On a phone a row becomes a few lines (`stack`),
    or the table scrolls on its own."""
    kinds = [' class="n"' if column.startswith("#") else "" for column in columns]
    head = "".join(f"<th{kind}>{escape(name.lstrip('#'))}</th>" for name, kind in zip(columns, kinds, strict=True))
    body = "".join(
        "<tr>"
        + "".join(
            f'<td{kind} data-name="{escape(name.lstrip("#"))}">{cell}</td>'
            for cell, kind, name in zip(row, kinds, columns, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    kind = ' class="stack"' if stack else ""
    return f'<div class="scroll"><table{kind}><tbody><tr>{head}</tr>{body}</tbody></table></div>'


def _verdict(plan: Plan, result: Mapping[str, Any]) -> str:
    tone, word, how = headline(plan, result)
    b = plan.arms["A"] if result["aa"] else plan.arms["B"]
    arms = "".join(
        f'<dt class="arm-{key}">{key}</dt><dd>{escape(arm.label)}</dd>'
        for key, arm in (("A", plan.arms["A"]), ("B", b))
    )
    question = f"<p>{escape(plan.question)}</p>" if plan.question else ""
    state = "" if result["state"] == "done" else f"<p><b>State: {result['state']}.</b> {escape(result['reason'])}</p>"
    parts = (
        f"<h1>{escape(plan.name)}{' · A/A' if result['aa'] else ''}</h1>",
        f'<p class="word">{escape(word)}</p><p class="how">{escape(how)}</p>',
        f'{state}{question}<dl class="arms">{arms}</dl>',
    )
    return _section("", *parts, kind=f"verdict {tone}")


def _cells(plan: Plan, result: Mapping[str, Any]) -> str:
    alone = len(plan.cells) == 1
    rows = [
        {"name": "B over A" if alone else name, **cell}
        for name, cell in result["cells"].items()
        if cell["verdict"] != "unfinished"
    ]
    if not rows:
        return ""
    lines = [
        (
            escape(row["name"]),
            f'<span class="tone {row["verdict"]}">{row["verdict"]}</span>',
            percent(row["speedup"]),
            f"{bound(row['interval'][0])} to {bound(row['interval'][1])}",
            p_value(row["p_value"]),
            p_value(row["sign_flip_p_value"]),
        )
        for row in rows
    ]
    bounded = [row for row in rows if None not in row["interval"] and max(row["interval"]) < 10.0]
    plot = interval_plot(bounded, result["margin"], "speed of B over A, % (right: B is faster)") if bounded else ""
    key = f'<p class="key"><span><i></i>margin ±{plain(result["margin"])}</span></p>'
    table = _table(("cell", "verdict", "#B over A", "#interval", "#p (t)", "#p (sign-flip)"), lines)
    return _section("Interval and margin", plot, key, table)


def _to_resolve(plan: Plan, cell: Cell, row: Mapping[str, Any], ok: Sequence[Mapping[str, Any]]) -> str:
    """What would settle an unresolved cell."""
    seconds = 4 * sum(launch["seconds"] for launch in ok) / len(ok)
    margin, planned = plan.design.margin, plan.design.blocks
    parts = []
    for blocks, what in (
        (row["blocks_to_show_a_difference"], f"show a difference of {plain(row['speedup'])}"),
        (row["blocks_to_show_equivalence"], f"show equivalence within ±{plain(margin)}"),
    ):
        parts.append(f"<li><b>{blocks} blocks</b> to {what}: about {duration(blocks * seconds)}</li>" if blocks else "")
    sd = log(1.0 + margin) * sqrt(planned) / float(student.isf((1.0 - row["level"]) / 2.0, planned - 1))
    return _section(
        f"What would resolve it{_of(plan, cell)}",
        f"<p>Differences below {plain_bound(row['resolution'])} cannot be told from none here. If mean and spread stay "
        "as they are, a new plan with one look would need:</p>",
        f"<ul>{''.join(parts) or '<li>more blocks than are within reach</li>'}</ul>",
        f"<p>Or a steadier machine: blocks spread by {plain(fraction(row['block_sd']))} (standard deviation); with "
        f"{planned} blocks, below {plain(fraction(sd))} is needed to see into the margin.</p>",
        '<p class="soft">Not by adding blocks to this run: how many there are was part of its error rate.</p>',
    )


def _blocks(plan: Plan, cell: Cell, row: Mapping[str, Any], experiment: Mapping[str, Any]) -> str:
    blocks = [
        {"block": index, "order": experiment["orders"][index][cell.name], "effect": fraction(ratio)}
        for index, ratio in enumerate(row["log_ratios"])
    ]
    low, high = (end if end is not None else 0.0 for end in row["interval"])
    plot = block_plot(blocks, plan.design.margin, row["speedup"], (low, high), "speed of B over A in each block, %")
    key = (
        f'<p class="key"><span><i></i>margin ±{plain(plan.design.margin)}</span>'
        f'<span><i class="over"></i>{level(row)} interval of the mean</span></p>'
    )
    return _section(f"Blocks{_of(plan, cell)}", plot, key)


def _launches(plan: Plan, cell: Cell, ok: Sequence[Mapping[str, Any]]) -> str:
    number = number_name(cell)
    about = "The bar is the launch's one number"
    if any(launch["quantiles"] for launch in ok):
        about += "; the box and the line hold 50 % and 90 % of what is behind it"
    names = list(dict.fromkeys(key for launch in ok for key in launch["beside"] if launch["beside"][key] is not None))
    rows = [
        (
            str(launch["block"] + 1),
            f'<span class="letter arm-{launch["arm"]}">{launch["arm"]}</span>',
            f"{launch['number']:.5g}",
            *(short(launch["beside"].get(name)) for name in names),
        )
        for launch in ok
    ]
    columns = ("#block", "arm", "#" + number, *("#" + name.replace("_", " ") for name in names))
    plot = f'<p class="soft">{about}.</p>{launch_plot(ok, number)}'
    if len(plan.cells) > 1:
        plot = f"<details><summary>{len(ok)} distributions</summary>{plot}</details>"
    table = f"<details><summary>Numbers</summary>{_table(columns, rows, stack=False)}</details>"
    return _section(f"Launches{_of(plan, cell)}", plot, table)


def _floor(plan: Plan, result: Mapping[str, Any]) -> str:
    if result["aa"]:
        return ""
    if not result["floor"]:
        return _section(
            "Floor",
            "<p>No A/A run of this plan came before it, so what this environment does to two equal arms is unknown. "
            "<code>deltagram compare plan.toml --aa</code> finds out.</p>",
        )
    rows = [
        (escape(run["record"]), escape(name), cell["verdict"], f"±{plain_bound(cell['resolution'])}")
        for run in result["floor"]
        for name, cell in run["cells"].items()
    ]
    return _section(
        "Floor: A against itself",
        "<p>What the same plan found between two equal arms before this run.</p>",
        _table(("A/A run", "cell", "verdict", "#resolution"), rows),
    )


def _thrown_out(result: Mapping[str, Any]) -> str:
    rows = [
        (f"<code>{escape(one['folder'])}</code>", one["state"], escape(one.get("rule") or "—"), escape(one["reason"]))
        for one in result["thrown_out"]
    ]
    table = _table(("launch", "state", "rule", "why"), rows) if rows else "<p>None.</p>"
    return _section("Launches thrown out", table)


def _method(
    plan: Plan, experiment: Mapping[str, Any], result: Mapping[str, Any], launches: Sequence[Mapping[str, Any]]
) -> str:
    design = plan.design
    looks = ", ".join(map(str, design.looks))
    facts = {
        "Number": "; ".join(dict.fromkeys(number_name(cell) for cell in plan.cells)),
        "Design": f"{design.blocks} blocks, ABBA or BAAB at random (seed {design.seed}); each letter a fresh launch",
        "Error": f"{design.alpha:g} over all cells and looks (at {looks} blocks, {design.spending})",
        "Margin": f"±{plain(design.margin)}",
        "Rules": _rules(plan, launches),
        "Plan": f"sha256 {result['plan_sha256'][:16]}",
        "Prompts": "; ".join(f"{name}: sha256 {sha[:16]}" for name, sha in result["prompts_sha256"].items()) or "none",
        "Begun": experiment["created"],
        "Ended": result["finished"],
    }
    rows = "".join(f"<tr><th>{name}</th><td>{escape(value)}</td></tr>" for name, value in facts.items())
    arms = "".join(
        f'<p><span class="arm-{key} letter">{key}</span> <code>{escape(arm_words(arm))}</code></p>'
        for key, arm in plan.arms.items()
        if not (result["aa"] and key == "B")
    )
    return _section(
        "Method",
        f'<table class="facts">{rows}</table>{arms}',
        "<p>One launch gives one number, one block one ratio of B to A. The interval and the verdict come from the t "
        "distribution over blocks; steps are never pooled. The plan was fixed before the first launch.</p>",
        f"<details><summary>plan.toml</summary><pre>{escape(plan.source)}</pre></details>",
    )


def _environment(experiment: Mapping[str, Any]) -> str:
    env = experiment["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in env["versions"].items() if version)
    facts = {
        "GPU": "; ".join(f"{g['name']}, driver {g['driver_version']}" for g in env["gpus"]) or "none",
        "CPU": f"{env['cpu'] or env['machine']}, {env['cpus']} in use, governor {env['cpu_governor'] or 'unknown'}",
        "Memory": f"{env['memory_gib']} GiB",
        "Load at the start": ", ".join(f"{value:.2f}" for value in env["load_average"]),
        "System": f"{env['system']} {env['kernel']}, Python {env['python']}",
        "Versions": versions,
        "Commit": (env["commit"] or "none") + (", with uncommitted changes" if env["uncommitted_changes"] else ""),
    }
    rows = "".join(f"<tr><th>{name}</th><td>{escape(value)}</td></tr>" for name, value in facts.items())
    return _section("Environment", f'<table class="facts">{rows}</table>')


def _rules(plan: Plan, launches: Sequence[Mapping[str, Any]]) -> str:
    """The rules asked for; one that no launch could say anything about is named as not checked."""
    facts = {
        "output_digest": "digests",
        "max_cache_hit_share": "cache_hit_share",
        "throttled": "throttled",
        "other_gpu_process": "other_gpu_processes",
        "max_other_cpu_share": "other_cpu_share",
        "max_drift": "drift",
        "min_steps": "steps",
    }
    of_a_kind = {"min_steps": "step", "max_drift": "step", "client_late": "load", "max_failed_share": "load"}
    kinds, words = {cell.measure.kind for cell in plan.cells}, []
    for rule, value in vars(plan.rules).items():
        if value in (None, False, "ignore") or (rule in of_a_kind and of_a_kind[rule] not in kinds):
            continue
        told = [one for one in launches if one.get("facts", {}).get(facts.get(rule, "")) is not None]
        text = f"{rule} = {str(value).lower() if isinstance(value, bool) else value}"
        words.append(text + (" (not checked: nothing told it)" if rule in facts and launches and not told else ""))
    return ", ".join(words)


def _of(plan: Plan, cell: Cell) -> str:
    return f": {cell.name}" if len(plan.cells) > 1 else ""
