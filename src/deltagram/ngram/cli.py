"""`deltagram ngram`: what memory a checkpoint has, and whether it is whole. Imports nothing heavy but in a command."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from deltagram.ngram.checkpoint import TableSource

app = typer.Typer(name="ngram", help="The n-gram memory of a checkpoint.", no_args_is_help=True)
Folder = Annotated[Path, typer.Argument(help="Checkpoint folder.")]
_console = Console()


@app.command()
def inspect(folder: Folder) -> None:
    """Families, layers, rows, bytes and constants of a checkpoint's memory tables, from its headers alone."""
    family, tables = _read(folder)
    _print([("family", family or "none: this checkpoint has no n-gram memory")])
    for table in tables:
        spec = table.spec
        shown = [
            ("rows", f"{spec.num_rows:,} of {table.format}; {table.nbytes / 2**30:.2f} GiB"),
            ("tensors", f"{len(table.tensors)}, from {table.tensors[0].name}"),
            ("columns", f"{spec.num_columns}, n-grams of 2 to {spec.max_order} tokens"),
            ("mix", "polynomial" if spec.polynomial else "xor"),
            ("multipliers", _list(spec.multipliers)),
            ("moduli", f"{spec.moduli[0]} ... {spec.moduli[-1]}, {sum(spec.moduli):,} in all"),
            ("fill", str(spec.fill)),
            ("end of sequence", "no token" if spec.end_of_sequence < 0 else f"token {spec.end_of_sequence}"),
        ]
        if spec.token_map is not None:
            shown.append(("token map", f"{len(spec.token_map):,} tokens to {len(set(spec.token_map) - {-1}):,} ids"))
        _print(shown, table.title)


@app.command()
def verify(
    folder: Folder,
    tokens: Annotated[int, typer.Option(help="Tokens of the sample.", min=1)] = 512,
    seed: Annotated[int, typer.Option(help="Which sample.")] = 0,
    max_gib: Annotated[float, typer.Option(help="Largest table to load into memory for the comparison.")] = 4.0,
    write_checksums: Annotated[bool, typer.Option(help="Keep checksums of the tables beside them.")] = False,
) -> None:
    """Hash and read a sample of random tokens and compare with the rules, token by token, and with every placement.

    Checksums, where the folder has them, are compared first.
    """
    from deltagram.ngram import checksums
    from deltagram.ngram.verify import verify_table

    _, tables = _read(folder)
    infos = [info for table in tables for info in table.tensors]
    if write_checksums:
        _print([("checksums", f"{len(infos)} kept in {checksums.write(folder, infos)}")])
    known = checksums.verify(folder, infos)
    _print([("checksums", f"{len(infos)} tensors are as they were" if known else "none are kept (--write-checksums)")])
    for table in tables:
        _print(verify_table(table, tokens, seed, int(max_gib * 2**30)), table.title)


def placement_report(folder: Path) -> list[tuple[str, str]]:
    """What each placement of the checkpoint's tables would take here, for `deltagram doctor`; empty without tables.

    Raises ValueError for tables that cannot be used.
    """
    import torch

    from deltagram.ngram.report import placement_rows

    _, tables = _read(folder)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return placement_rows(tables, device) if tables else []


def _read(folder: Path) -> tuple[str, "list[TableSource]"]:
    from deltagram.models.fields import read_json_object
    from deltagram.models.weights import open_checkpoint
    from deltagram.ngram.families import read_memory
    from deltagram.ngram.tokens import read_token_map

    config = read_json_object(folder / "config.json")
    return read_memory(config, open_checkpoint(folder).tensors, lambda: read_token_map(folder))


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _print(rows: Sequence[tuple[str, str]], title: str = "") -> None:
    if title:
        _console.print(f"\n[bold]{title}[/bold]")
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
    for name, value in rows:
        table.add_row(name, value)
    _console.print(table, markup=False, highlight=False)
