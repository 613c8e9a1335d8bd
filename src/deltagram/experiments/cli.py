"""`deltagram compare` and `deltagram bench serve`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table as RichTable

from deltagram.experiments.bench import FAILED, INTERRUPTED, REFUSED, bench, say
from deltagram.experiments.charts import percent
from deltagram.experiments.compare import Vetoed
from deltagram.experiments.compare import compare as run_compare
from deltagram.experiments.conclude import cell_row
from deltagram.experiments.read_plan import load_plan
from deltagram.experiments.records import finite
from deltagram.experiments.stats import PairedResult, paired_tests
from deltagram.experiments.tables import read_blocks
from deltagram.experiments.words import bound, headline, level, plain_bound

app = typer.Typer(no_args_is_help=True, help="Speed claims as experiments.")
app.add_typer(bench, name="bench")


@app.command()
def compare(
    plan: Annotated[Path | None, typer.Argument(help="The plan (TOML): docs/experiments.md.")] = None,
    aa: Annotated[bool, typer.Option("--aa", help="Run arm A against itself: the floor of this environment.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the latest record of this plan.")] = False,
    out: Annotated[Path, typer.Option(help="Folder of the records.")] = Path("experiments"),
    results: Annotated[
        Path | None, typer.Option("--from", help="Test the blocks of a CSV file instead of launching anything.")
    ] = None,
    margin: Annotated[
        float | None, typer.Option(help="With --from: smallest difference that matters (0.01 is 1 %).")
    ] = None,
    better: Annotated[str, typer.Option(help="With --from: lower (times) or higher (throughputs).")] = "lower",
    alpha: Annotated[float, typer.Option(help="With --from: error over all cells.")] = 0.05,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Decide whether arm B is faster than arm A: faster, slower, equivalent, or unresolved."""
    notes = Console(stderr=True)
    try:
        if results is not None:
            _compare_table(results, plan, margin, better, alpha, as_json)
            return
        if plan is None:
            raise ValueError("nothing to compare: expected a plan, or --from results.csv")
        loaded = load_plan(plan)
        outcome = run_compare(loaded, out, aa=aa, resume=resume, progress=_Lines(notes))
    except ValueError as error:
        say(notes, str(error), "red")
        raise typer.Exit(REFUSED) from None
    except Vetoed as error:
        say(notes, f"vetoed by the A/A run of this plan: {error}", "red")
        raise typer.Exit(FAILED) from None
    result = outcome.result
    if as_json:
        print(json.dumps(finite(result), indent=1))
    else:
        _, word, how = headline(loaded, result)
        console = Console()
        say(console, word, "bold")
        say(console, how)
        _print_cells({name: cell for name, cell in result["cells"].items() if cell["verdict"] != "unfinished"}, console)
    say(notes, f"record: {outcome.record.folder}")
    if result["state"] != "done":
        say(notes, f"{result['state']}: {result['reason']}\n--resume goes on from here", "yellow")
        raise typer.Exit(INTERRUPTED if result["state"] == "interrupted" else FAILED)


def _compare_table(
    file: Path, plan: Path | None, margin: float | None, better: str, alpha: float, as_json: bool
) -> None:
    if plan is not None:
        raise ValueError("--from tests the numbers of a file: it takes no plan, but --margin, --better and --alpha")
    if margin is None:
        raise ValueError("--from needs --margin, the smallest difference that matters (0.01 is 1 %)")
    tested = paired_tests(read_blocks(file), margin, better=better, alpha=alpha)
    cells = {name: cell_row(result, result.blocks) for name, result in tested.items()}
    if as_json:
        print(json.dumps(finite({"margin": margin, "cells": cells}), indent=1))
    else:
        _print_cells(cells, Console())


def _print_cells(cells: Mapping[str, Mapping[str, Any]], console: Console) -> None:
    if not cells:
        return
    table = RichTable(box=None, pad_edge=False)
    for column in ("cell", "verdict", "B over A", "interval", "p", "sign-flip p", "blocks"):
        table.add_column(column, justify="left" if column in ("cell", "verdict") else "right")
    for name, cell in cells.items():
        flip = cell["sign_flip_p_value"]
        table.add_row(
            name, cell["verdict"], percent(cell["speedup"]),
            f"{bound(cell['interval'][0])} to {bound(cell['interval'][1])} ({level(cell)})",
            f"{cell['p_value']:.3f}", "—" if flip is None else f"{flip:.3f}", str(cell["blocks"]),
        )  # fmt: skip
    console.print(table)
    for name, cell in cells.items():
        if cell["verdict"] == "unresolved":
            ways = (
                (cell["blocks_to_show_a_difference"], "a difference"),
                (cell["blocks_to_show_equivalence"], "equivalence"),
            )
            would = " or ".join(f"{blocks} blocks would show {what}" for blocks, what in ways if blocks)
            text = f"{name}: unresolved, resolution ±{plain_bound(cell['resolution'])}"
            say(console, text + (f"; as things stand {would}" if would else ""))


class _Lines:
    """Progress as lines: one when a launch has ended, with the time left; one per look."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def launching(self, what: str, done: int, total: int, left_s: float | None) -> None:
        left = "" if left_s is None else f", {_clock(left_s)} left at most"
        say(self.console, f"[{done}/{total}] {what}{left}")

    def launched(self, launch: Mapping[str, Any]) -> None:
        if launch["state"] == "ok":
            say(self.console, f"        {launch['number']:.6g} in {launch['seconds']:.1f} s")
        else:
            say(self.console, f"        thrown out, {launch['state']}: {launch['reason']}", "yellow")

    def looked(self, blocks: int, planned: int, results: Mapping[str, PairedResult]) -> None:
        for name, result in results.items():
            low, high = (bound(end) for end in result.interval)
            say(self.console, f"look at {blocks} blocks, {name}: {result.verdict}, {low} to {high}", "bold")
            if result.verdict == "unresolved" and blocks < planned:
                ahead = cell_row(result, planned)
                resolution = plain_bound(ahead["resolution_at_the_planned_blocks"])
                found = plain_bound(ahead["detectable_at_the_planned_blocks"])
                text = f"{planned} blocks should resolve ±{resolution} and find {found} four times in five"
                say(self.console, f"        with this spread, {text}")


def _clock(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
