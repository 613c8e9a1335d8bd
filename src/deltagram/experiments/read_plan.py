"""Reads plan.toml: problems are collected over the whole file and raised as one ValueError."""

import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deltagram.experiments.fields import REQUIRED, Table
from deltagram.experiments.load import SUMMARY_BETTER, read_load
from deltagram.experiments.plan import BUILT_IN, DIGESTS, MEASURES, STEP_KINDS, Arm, Cell, Design, Measure, Plan, Rules
from deltagram.experiments.spending import SPENDINGS
from deltagram.experiments.workload import Manifest, read, synthetic


def load_plan(path: Path) -> Plan:
    """The plan in the TOML file `path`. Raises ValueError naming every problem of it."""
    try:
        source = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot read the plan: {error}") from None
    return parse_plan(source, path.resolve().parent)


def parse_plan(source: str, folder: Path) -> Plan:
    try:
        values = tomllib.loads(source)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"the plan is not TOML: {error}") from None
    problems: list[str] = []
    top = Table(values, "", problems)
    name = top.get("name", REQUIRED, is_name, "letters, digits, . _ - (it names the record folder)", "?")
    question = top.text("question", "")
    design = _design(top.table("design", required=True))
    arms_table = top.table("arm", required=True)
    arms = {}
    if arms_table is not None:
        arms = {key: _arm(arms_table.table(key, required=True), key, folder) for key in ("A", "B")}
        arms_table.done()
    rules = _rules(top.table("invalid"), problems)
    top.known.update(("measure", "prompts", "cell"))
    cells = _cells(values, folder, problems)
    top.done()
    if not problems:
        _check_whole(arms, cells, problems)
    if problems:
        raise ValueError("the plan has problems:\n  " + "\n  ".join(problems))
    return Plan(name, question, design, arms, cells, rules, source, folder)


def _design(table: Table | None) -> Design:
    if table is None:
        return Design(0.01, 6, (6,), 0.05, SPENDINGS[0], 0, 3)
    blocks = table.integer("blocks", least=2)
    looks = table.integers("looks", [blocks])
    if looks != sorted(set(looks)) or not looks or looks[0] < 2 or looks[-1] != blocks:
        table.problem("looks", f"is {looks}; expected increasing block counts from 2 up that end at blocks = {blocks}")
    design = Design(
        margin=table.number("margin", below=1.0),
        blocks=blocks,
        looks=tuple(looks),
        alpha=table.number("alpha", 0.05, below=0.5),
        spending=table.choice("spending", SPENDINGS, SPENDINGS[0]),
        seed=table.integer("seed", 0),
        retries=table.integer("retries", 3),
    )
    table.done()
    return design


def _arm(table: Table | None, key: str, folder: Path) -> Arm:
    table = table or Table({"command": "?"}, "", [])
    command, model = table.texts("command", None), table.text("model", None)
    settings, commit = table.mapping("settings"), table.text("commit", None)
    if (command is None) == (model is None):
        table.problem("", "needs either command or model")
    if settings and model is None:
        table.problem("settings", "go with model; a command carries its own")
    environment = table.mapping("env")
    if not all(isinstance(value, str) for value in environment.values()):
        table.problem("env", f"is {environment!r:.80}; expected texts")
    ready = table.table("ready")
    url = output = None
    timeout_s = 120.0
    if ready is not None:
        url, output = ready.text("url", None), ready.pattern("output", None)
        timeout_s = ready.number("timeout_s", timeout_s)
        if (url is None) == (output is None):
            ready.problem("", "needs either url or output")
        ready.done()
    where = (folder / table.text("folder", ".")).resolve()
    if not where.is_dir():
        table.problem("folder", f"is {where}, which is no folder")
    label = table.text("label", f"arm {key}")
    table.done()
    return Arm(
        label, split_command(command), model, settings, commit, where, environment, url, output, float(timeout_s)
    )


def is_name(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9._-]+", value) is not None


def split_command(command: str | Sequence[str] | None) -> tuple[str, ...] | None:
    return None if command is None else tuple(shlex.split(command) if isinstance(command, str) else command)


def _rules(table: Table | None, problems: list[str]) -> Rules:
    table = table or Table({}, "invalid", problems)
    rules = Rules(
        output_digest=table.choice("output_digest", DIGESTS, "equal"),
        output_lengths=table.flag("output_lengths", True),
        max_failed_share=table.from_zero("max_failed_share", 0.0),
        max_cache_hit_share=table.from_zero("max_cache_hit_share", None),
        client_late=table.flag("client_late", True),
        throttled=table.flag("throttled", True),
        other_gpu_process=table.flag("other_gpu_process", True),
        max_other_cpu_share=table.number("max_other_cpu_share", None, below=1.0),
        max_drift=table.number("max_drift", None),
        min_steps=table.integer("min_steps", 20, least=2),
        max_gap_s=table.number("max_gap_s", 3600.0),
    )
    table.done()
    return rules


def _cells(values: dict[str, Any], folder: Path, problems: list[str]) -> tuple[Cell, ...]:
    given = values.get("cell", [{"name": "all"}])
    if not isinstance(given, list) or not given:
        problems.append(f"cell is {given!r:.60}; expected [[cell]] tables")
        return ()
    cells = []
    for index, raw in enumerate(given):
        table = Table(raw, f"cell[{index}]", problems)
        name = table.get("name", REQUIRED, is_name, "letters, digits, . _ -", f"cell-{index}")
        own = table.mapping("set")
        if not all(isinstance(v, str | int | float) and re.fullmatch(r"[a-z_]+", key) for key, v in own.items()):
            table.problem("set", f"is {own!r:.80}; expected lower-case names with texts or numbers")
        merged = {}
        for key in ("measure", "prompts"):
            base, override = values.get(key), table.mapping(key)
            merged[key] = {**base, **override} if isinstance(base, dict) else (override or base)
        table.done()
        where = f"cell[{index}]." if "cell" in values else ""
        measure = _measure(merged["measure"], f"{where}measure", problems)
        manifest = read_manifest(merged["prompts"], f"{where}prompts", folder, problems)
        cells.append(Cell(name, {key: str(value) for key, value in own.items()}, measure, manifest))
    names = [cell.name for cell in cells]
    if len(set(names)) != len(names):
        problems.append(f"cell names are {names}; expected different ones")
    # The same problem of a shared table shows up once per cell.
    problems[:] = list(dict.fromkeys(problems))
    return tuple(cells)


def _measure(values: Any, path: str, problems: list[str]) -> Measure:
    table = Table(values if values is not None else {}, path, problems)
    kind = table.choice("kind", MEASURES)
    timeout_s = float(table.number("timeout_s", 600.0))
    command = split_command(table.texts("command", None))
    steps, warmup, per_token, digest = "decode", 0, False, None
    better, number, number_from = "lower", "median step (ms)", "trace"
    load = None
    if kind == "step":
        steps, warmup = table.choice("steps", STEP_KINDS, "decode"), table.integer("warmup", 0)
        per_token = table.flag("per_token", False)
    elif kind == "load":
        number, number_from = table.choice("number", tuple(SUMMARY_BETTER), "median_tpot_ms"), "summary"
        better, load = SUMMARY_BETTER[number], read_load(table)
        if command is not None:
            table.problem("command", "does not go with kind = 'load': the load generator measures")
    else:
        better = table.choice("better", ("lower", "higher"))
        regex, path_in_json = table.pattern("regex", None), table.text("json", None)
        if (regex is None) == (path_in_json is None):
            table.problem("", "needs either regex (whose first group is the number) or json (the dotted path to it)")
        number, number_from = (regex, "regex") if regex is not None else (path_in_json or "?", "json")
        digest = table.pattern("digest", None)
        for key, pattern in (("regex", regex), ("digest", digest)):
            if pattern is not None and not _has_group(pattern):
                table.problem(key, f"is {pattern!r}; expected one with a (group)")
    table.done()
    return Measure(kind, better, number, number_from, timeout_s, command, digest, steps, warmup, per_token, load)


def _has_group(pattern: str) -> bool:
    try:
        return re.compile(pattern).groups > 0
    except re.error:
        return True  # reported where it was read


def read_manifest(values: Any, path: str, folder: Path, problems: list[str]) -> Manifest | None:
    """The manifest of a [prompts] table; None with a problem noted, or where there is no table."""
    if values is None:
        return None
    table = Table(values, path, problems)
    file = table.text("file", None)
    if file is not None:
        table.done()
        try:
            return read(folder / file)
        except (OSError, ValueError) as error:
            table.problem("file", f"is {file!r}: {error}")
            return None
    made = synthetic(
        sessions=table.integer("sessions", least=1),
        turns=table.integer("turns", 1, least=1),
        input_tokens=table.integer("input_tokens", least=1),
        output_tokens=table.integer("output_tokens", least=1),
        delay_s=table.from_zero("delay_s", 0.0),
        shared_tokens=table.integer("shared_tokens", 0),
        seed=table.integer("seed", 0),
    )
    table.done()
    return made


def _check_whole(arms: Mapping[str, Arm], cells: Sequence[Cell], problems: list[str]) -> None:
    """Relations between the parts, looked at only when every part is well formed."""
    known = {*BUILT_IN, *cells[0].values}
    for cell in cells:
        if set(cell.values) != set(cells[0].values):
            problems.append(f"cell {cell.name!r} sets {sorted(cell.values)}; the first sets {sorted(cells[0].values)}")
        kind = cell.measure.kind
        if kind == "load" and cell.manifest is None:
            problems.append(f"cell {cell.name!r}: load needs [prompts]")
        for key, arm in arms.items():
            if kind == "load" and arm.model is None and arm.ready_url is None:
                problems.append(f"arm.{key}.ready.url is missing; load sends its requests to that host")
            if arm.model is not None and kind == "command":
                problems.append(f"arm.{key}.model goes with kind = 'step' or 'load', not 'command'")
            if arm.model is not None and kind == "step" and cell.manifest is None:
                problems.append(f"cell {cell.name!r}: a model arm needs [prompts]")
            if arm.command is not None and kind != "load" and arm.stays_up and cell.measure.command is None:
                problems.append(f"arm.{key} stays up, so measure.command must say what measures it")
            if cell.measure.command is not None and not arm.stays_up:
                problems.append(f"arm.{key} has no ready probe, so it runs to its end: measure.command has no use")
        commands = [cell.measure.command or (), *(arm.command or () for arm in arms.values())]
        for command in commands:
            for word in command:
                for name in re.findall(r"\{([a-z_]+)\}", word):
                    if name not in known:
                        problems.append(
                            f"{{{name}}} in {word!r:.60} is no placeholder; known: {', '.join(sorted(known))}"
                        )
    problems[:] = list(dict.fromkeys(problems))
