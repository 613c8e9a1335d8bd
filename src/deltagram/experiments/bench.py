"""`deltagram bench serve`: load a server and time what it does."""

import asyncio
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from secrets import randbelow
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.status import Status
from rich.table import Table as RichTable

from deltagram.experiments.fields import Table
from deltagram.experiments.load import LoadResult, read_load
from deltagram.experiments.measure import save_load
from deltagram.experiments.read_plan import read_manifest
from deltagram.experiments.records import finite, write_bytes

bench = typer.Typer(no_args_is_help=True, help="Load a server and time it; `bench step`: time one step of a model.")

FAILED, REFUSED, INTERRUPTED = 1, 2, 130  # exit statuses, as everywhere in `deltagram`


@bench.callback()
def _bench() -> None:
    """Keeps `serve` a command of its own while it is the only one."""


@bench.command()
def serve(
    url: Annotated[str, typer.Option(help="Scheme, host and port of the server.")] = "http://127.0.0.1:8000",
    endpoint: Annotated[str, typer.Option(help="chat or completions.")] = "chat",
    model: Annotated[str | None, typer.Option(help="Model name; by default the first that the server lists.")] = None,
    file: Annotated[
        Path | None, typer.Option("--prompts", help="Sessions or a trace (JSON lines): docs/experiments.md.")
    ] = None,
    sessions: Annotated[int, typer.Option(help="Made sessions, without --prompts.")] = 32,
    turns: Annotated[int, typer.Option(help="Turns of a made session.")] = 1,
    input_tokens: Annotated[int, typer.Option(help="New tokens of each made turn, about.")] = 256,
    output_tokens: Annotated[int, typer.Option(help="Tokens to generate in each made turn.")] = 64,
    shared_tokens: Annotated[int, typer.Option(help="Prefix that all made sessions share, about.")] = 0,
    tool_delay: Annotated[float, typer.Option(help="Gap before each later turn of a made session, in seconds.")] = 0.0,
    arrivals: Annotated[str | None, typer.Option(help="closed, poisson or trace.")] = None,
    concurrency: Annotated[
        int | None, typer.Option(help="Sessions at a time (closed), or the most requests in flight.")
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Sessions per second: Poisson arrivals.")] = None,
    burstiness: Annotated[float, typer.Option(help="Shape of the gaps: 1 is Poisson, below 1 burstier.")] = 1.0,
    duration: Annotated[float | None, typer.Option(help="End after this many seconds.")] = None,
    slo_ttft_ms: Annotated[float | None, typer.Option(help="Objective of a request.")] = None,
    slo_tpot_ms: Annotated[float | None, typer.Option(help="Objective of a request.")] = None,
    slo_e2el_ms: Annotated[float | None, typer.Option(help="Objective of a request.")] = None,
    slo_share: Annotated[float, typer.Option(help="Share of requests that must meet the objectives.")] = 0.95,
    force_lengths: Annotated[bool, typer.Option(help="Send min_tokens and ignore_eos.")] = True,
    extra: Annotated[str, typer.Option("--extra-body", help="JSON object of further request keys.")] = "{}",
    seed: Annotated[int | None, typer.Option(help="Of prompts and arrivals; drawn and printed by default.")] = None,
    api_key: Annotated[str | None, typer.Option(help="Bearer token.")] = None,
    self_test: Annotated[
        bool, typer.Option("--self-test", help="Then check that the client could have seen better.")
    ] = False,
    save: Annotated[
        Path | None, typer.Option(help="Folder for requests.jsonl, vllm-bench.json, profile_export_aiperf.json.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Replay sessions against an OpenAI-compatible server: TTFT, TPOT, ITL, end-to-end, goodput, objectives."""
    try:
        from deltagram.experiments.client import run_load
        from deltagram.experiments.client import self_test as run_self_test
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "aiohttp":
            raise
        say(Console(stderr=True), "`bench serve` needs aiohttp: pip install 'deltagram[experiments]'", "red")
        raise typer.Exit(FAILED) from None

    notes = Console(stderr=True)
    # Text that was sent before sits in the server's prefix cache: a fresh seed measures the server.
    seed = randbelow(1 << 30) if seed is None else seed
    keys: dict[str, Any] = {"endpoint": endpoint, "burstiness": burstiness, "seed": seed}
    keys |= {"force_lengths": force_lengths, "model": model, "rate": rate, "duration_s": duration, "arrivals": arrivals}
    if concurrency is not None or (rate is None and arrivals in (None, "closed")):
        keys["concurrency"] = concurrency if concurrency is not None else 8
    keys["slo"] = _given(ttft_ms=slo_ttft_ms, tpot_ms=slo_tpot_ms, e2el_ms=slo_e2el_ms, share=slo_share)
    prompts: dict[str, Any] = {"file": str(file)}
    if file is None:
        prompts = {"sessions": sessions, "turns": turns, "input_tokens": input_tokens, "output_tokens": output_tokens}
        prompts |= {"delay_s": tool_delay, "shared_tokens": shared_tokens, "seed": seed}
    problems: list[str] = []
    try:
        keys["extra"] = json.loads(extra)
    except ValueError as error:
        problems.append(f"extra-body is {extra!r}: {error}")
    load = read_load(Table(_given(**keys), "", problems))
    manifest = read_manifest(prompts, "", Path(), problems)
    if problems or manifest is None:
        say(notes, "\n".join(problems), "red")
        raise typer.Exit(REFUSED)
    total = sum(len(session.turns) for session in manifest.sessions)
    say(notes, f"seed {seed}, {len(manifest.sessions)} sessions, {total} turns, prompts sha256 {manifest.sha256[:16]}")
    reasons: list[str] = []
    try:
        with notes.status("running") as status:
            progress = partial(_show, status, total)
            result = asyncio.run(run_load(url, manifest, load, api_key=api_key, progress=progress))
            summary = result.summary()
            if self_test and summary["completed"]:
                tpot_ms = summary.get("median_tpot_ms", 1.0)
                reasons = asyncio.run(run_self_test(load, manifest, summary["median_ttft_ms"], tpot_ms))
    except ConnectionError as error:
        say(notes, str(error), "red")
        raise typer.Exit(FAILED) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    if save is not None:
        save.mkdir(parents=True, exist_ok=True)
        write_bytes(save / "prompts.jsonl", manifest.lines().encode())
        save_load(result, save)
    reasons = [*result.client.reasons, *reasons]
    if as_json:
        about = {"seed": seed, "prompts_sha256": manifest.sha256, "client_bottleneck": reasons}
        print(json.dumps(finite(summary | about), indent=1))
    else:
        _print_summary(result, summary, reasons, self_test, Console())
    if summary["completed"] == 0:
        raise typer.Exit(FAILED)


def say(console: Console, text: str, style: str = "") -> None:
    """A message as it is: nothing in it is markup, and no line is broken."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _show(status: Status, total: int, done: int) -> None:
    status.update(f"{done} of {total} requests")


def _given(**values: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _print_summary(
    result: LoadResult, summary: Mapping[str, Any], reasons: list[str], tested: bool, console: Console
) -> None:
    counts = ("completed", "failed", "unfinished", "duration")
    rates = ("request_throughput", "output_throughput", "request_goodput")
    shares = ("slo_share", "slo_met", "cache_hit_share", "acceptance_length")
    for name in (*counts, *rates, *shares):
        value = summary[name]
        if value is not None:
            text = f"{value:.4g}" if isinstance(value, float) else str(value)
            say(console, f"{name.replace('_', ' '):<20} {text}")
    table = RichTable(box=None, pad_edge=False)
    for column in ("ms", "mean", "median", "p90", "p95", "p99"):
        table.add_column(column, justify="right" if column != "ms" else "left")
    for name in ("ttft", "tpot", "itl", "e2el"):
        if f"mean_{name}_ms" in summary:
            table.add_row(
                name.upper(), *(f"{summary[f'{s}_{name}_ms']:.2f}" for s in ("mean", "median", "p90", "p95", "p99"))
            )
    console.print(table)
    if result.ran_dry:
        say(console, "the sessions ran out before the duration did: the tail had fewer at a time", "yellow")
    if result.load.force_lengths and not result.forced:
        say(console, "the server refuses min_tokens and ignore_eos: output lengths are its own", "yellow")
    for error in sorted({reply.error for reply in result.replies if reply.error is not None})[:5]:
        say(console, error, "yellow")
    if reasons:
        say(console, "the client was the bottleneck: " + "; ".join(reasons), "red")
    else:
        health = result.client
        kept = "kept up" + (" and passed its self-test" if tested else "")
        say(
            console,
            f"the client {kept}: event loop {health.p99_lag_ms:.1f} ms late, sends {health.p99_late_ms:.1f} ms late "
            f"(p99), {health.cpu_share:.0%} of a core",
        )
