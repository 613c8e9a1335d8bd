"""The command `deltagram`. Text goes to stdout, everything else to stderr.

Exit codes: 0; 1 when something failed; 2 for what the user can put right; 130 for ctrl-C; 141 when the reader of stdout
is gone. Nothing heavy is imported before a command needs it: `--help` is to be quick.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import fields
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from deltagram import __version__
from deltagram.ngram import cli as ngram_cli

if TYPE_CHECKING:
    from deltagram import LLM, SamplingParams
    from deltagram.engine.engine import Stats
    from deltagram.parallel.groups import Group

app = typer.Typer(
    name="deltagram",
    help="Text from language models with n-gram memory and gated-delta-rule layers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(ngram_cli.app)
FAILED, REFUSED, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141

Model = Annotated[
    str | None, typer.Option(help="Checkpoint folder or hub id (owner/name); left out, the shipped model.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Dtype = Annotated[str, typer.Option(help="auto, float32 or bfloat16.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A setting of the engine, such as max_context=4096."),
]
MaxTokens = Annotated[int | None, typer.Option(help="Most tokens to generate.")]
Temperature = Annotated[float | None, typer.Option(help="0 always takes the likeliest token.")]
TopK = Annotated[int | None, typer.Option(help="Choose among the k likeliest tokens; 0 is off.")]
TopP = Annotated[float | None, typer.Option(help="Choose among the likeliest tokens of this total probability.")]
MinP = Annotated[float | None, typer.Option(help="Choose among tokens this likely, relative to the likeliest.")]
RepetitionPenalty = Annotated[float | None, typer.Option(help="Above 1 makes tokens that occurred less likely.")]
Seed = Annotated[int | None, typer.Option(help="Same seed, same text.")]
Ranks = Annotated[
    int | None, typer.Option(min=1, help="Processes of this machine that hold the n-gram tables together.")
]
Stop = Annotated[list[str] | None, typer.Option(help="Text to stop before; may be repeated.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None: ...


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to go on from; - reads it from stdin.")],
    model: Model = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    seed: Seed = None,
    stop: Stop = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's end token.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object when done.")] = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    settings: Set = None,
    ranks: Ranks = None,
    trace: Annotated[Path | None, typer.Option(help="Write a JSON line for every step to this file.")] = None,
) -> None:
    """Continue a text, streaming it to stdout."""
    with _exits(), ExitStack() as stack:
        _start_ranks(ranks)
        params = _sampling_params(
            max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
            repetition_penalty=repetition_penalty, seed=seed, stop=stop, ignore_eos=ignore_eos or None,
        )  # fmt: skip
        file = None if trace is None else stack.enter_context(trace.open("w", encoding="utf-8"))
        text = _read_stdin() if prompt == "-" else prompt
        llm = stack.enter_context(_load(model, device=device, dtype=dtype, settings=settings))
        if file is not None:
            stack.callback(_write_trace, llm, file)
        if as_json:
            (completion,) = llm.generate(text, params)
            (output,) = completion.outputs
            result = {
                "prompt": text,
                "prompt_token_ids": completion.prompt_token_ids,
                "text": output.text,
                "token_ids": output.token_ids,
                "finish_reason": output.finish_reason,
                "stats": _counts(llm.stats),
            }
            _write(json.dumps(result) + "\n")
            return
        with closing(llm.stream(text, params)) as chunks:  # type: ignore[type-var]
            for chunk in chunks:
                _write(chunk.text)
        if sys.stdout.isatty():
            _write("\n")
        Console(stderr=True).print(_steps_table(llm.stats))


@app.command()
def chat(
    model: Model = None,
    system: Annotated[str | None, typer.Option(help="Instructions that come before the conversation.")] = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    seed: Seed = None,
    stop: Stop = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    settings: Set = None,
    ranks: Ranks = None,
) -> None:
    """Talk to a model that has a chat template, one line at a time. /reset forgets, /exit leaves."""
    with _exits(), ExitStack() as stack:
        _start_ranks(ranks)
        params = _sampling_params(
            max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
            repetition_penalty=repetition_penalty, seed=seed, stop=stop,
        )  # fmt: skip
        llm = stack.enter_context(_load(model, device=device, dtype=dtype, settings=settings))
        if llm.tokenizer.chat_template is None:
            raise ValueError("this model has no chat template: use `deltagram generate`")
        first = [{"role": "system", "content": system}] if system else []
        messages = list(first)
        for line in _lines():
            if line == "/exit":
                break
            if line == "/reset":
                messages = list(first)
                _say("The conversation starts anew.", "dim")
            elif line.startswith("/"):
                _say(f"unknown command {line}; known are /reset and /exit")
            elif line.strip():
                messages.append({"role": "user", "content": line})
                reply = _reply(llm, messages, params)
                messages = [*messages[:-1]] if reply is None else [*messages, {"role": "assistant", "content": reply}]


def _reply(llm: "LLM", messages: list[dict[str, str]], params: "SamplingParams") -> str | None:
    """Streams the answer, or as much as there is until ctrl-C. None, with a message, if the prompt is refused."""
    pieces: list[str] = []
    try:
        prompt = llm.tokenizer.encode(llm.tokenizer.apply_chat_template(messages), add_special_tokens=False)
        with closing(llm.stream(prompt, params)) as chunks:  # type: ignore[type-var]
            for chunk in chunks:
                pieces.append(chunk.text)
                _write(chunk.text)
    except ValueError as error:
        _say(f"{error}\n(/reset starts a new conversation)", "red")
        return None
    except KeyboardInterrupt:
        _say("\ninterrupted", "dim")
    _write("\n")
    return "".join(pieces)


@app.command()
def doctor(
    model: Annotated[str | None, typer.Option(help="Checkpoint folder or hub id to examine as well.")] = None,
) -> None:
    """Say what this machine can do, and whether a model can run on it."""
    from deltagram.doctor import examine

    with _exits():
        if not examine(model, Console()):
            raise typer.Exit(FAILED)


@app.command()
def serve(
    model: Annotated[
        str | None, typer.Argument(help="Checkpoint folder or hub id (owner/name); left out, the shipped model.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is all of this machine's.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="DELTAGRAM_API_KEY",
            help="What clients must send; may be repeated. Others can read arguments: prefer the variable.",
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="What the model is called; left out, as its folder is.")] = None,
    limit: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A limit of the server, such as max_queued=32.")
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    settings: Set = None,
) -> None:
    """Serve a model over HTTP as OpenAI's API does, with a page to try it at /. See docs/server.md."""
    with _exits():
        try:
            from deltagram.serving import command
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in ("fastapi", "uvicorn", "prometheus_client", "llguidance"):
                raise
            _say(f"`deltagram serve` needs {error.name}: pip install 'deltagram[serve]'", "red")
            raise typer.Exit(FAILED) from None
        options = {"model": model, "device": device, "dtype": dtype, **_settings(settings or [])}
        limits = _pairs("--limit", limit or [])
        command.run(options, name=name, host=host, port=port, limits=limits, keys=api_key or [], say=_say)


_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command(context_settings=_PASS_ON, add_help_option=False)
def compare(context: typer.Context) -> None:
    """Decide by a paired experiment whether one way to serve is faster than another."""
    _experiments("compare", context.args)


@app.command(context_settings=_PASS_ON, add_help_option=False)
def bench(context: typer.Context) -> None:
    """Measure a running server (`bench serve`), or one step of a model (`bench step`)."""
    if context.args[:1] == ["step"]:
        from deltagram import step_bench

        step_bench.app(context.args[1:], prog_name="deltagram bench step")
    _experiments("bench", context.args)


def _experiments(command: str, arguments: list[str]) -> None:
    try:
        from deltagram.experiments import cli
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "scipy":
            raise
        _say(f"`deltagram {command}` needs scipy: pip install 'deltagram[experiments]'", "red")
        raise typer.Exit(FAILED) from None
    cli.app([command, *arguments], prog_name="deltagram")


def main() -> None:
    """The console script. What a mounted command refuses is said as our own commands say it."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may lack characters that a model has
    try:
        app()
    except (ValueError, OSError) as error:
        _say(str(error), "red")
        sys.exit(REFUSED)


def _say(text: str, style: str = "") -> None:
    """A message for the user, as it is: nothing in it is markup, and no line is broken."""
    Console(stderr=True).print(text, style=style, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _exits() -> Iterator[None]:
    """Turns what can go wrong in a command into a line on stderr and an exit code; our own faults keep a traceback."""
    try:
        yield
    except KeyboardInterrupt:
        _say("\ninterrupted", "dim")
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python complains when it flushes stdout at exit
        raise typer.Exit(BROKEN_PIPE) from None
    except RuntimeError as error:
        from deltagram.parallel.watchdog import EXIT_CODE, HangError

        if not isinstance(error, HangError) and not isinstance(error.__cause__, HangError):
            raise
        _say(str(error.__cause__ or error), "red")
        raise typer.Exit(EXIT_CODE) from None
    except (ValueError, OSError) as error:
        _say(str(error), "red")
        raise typer.Exit(REFUSED) from None


def _sampling_params(**given: Any) -> "SamplingParams":
    from deltagram import SamplingParams

    return SamplingParams(**{name: value for name, value in given.items() if value is not None})


def _start_ranks(ranks: int | None) -> None:
    """With --ranks, runs this command as so many processes and exits as they do; returns in each of them."""
    if ranks is None or "RANK" in os.environ:
        return
    from deltagram.parallel.launch import launch

    code = "from deltagram.cli import main; main()"
    raise typer.Exit(launch(["-c", code, *sys.argv[1:]], ranks))


def _group(device: str) -> "Group | None":
    """The ranks that torchrun or --ranks started, this process being one of them; None if it is alone."""
    if "RANK" not in os.environ:
        return None
    import torch

    from deltagram.parallel.groups import join

    return join(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)


@contextmanager
def _load(model: str | None, *, device: str, dtype: str, settings: list[str] | None) -> Iterator["LLM"]:
    """Loads the model, with a bar on a terminal, and says what it has to note. Of several ranks it returns on rank 0
    alone: the others take part in its steps until it is closed, and exit."""
    chosen = _settings(settings or [])
    from deltagram import LLM

    group = _group(device)
    console = Console(stderr=True)
    columns = SpinnerColumn(), TextColumn("loading"), DownloadColumn(), TransferSpeedColumn()
    shown: dict[str, Any] = {"console": console, "transient": True, "disable": not console.is_terminal}
    sizes = Progress(SpinnerColumn(), TextColumn("capturing steps"), BarColumn(), MofNCompleteColumn(), **shown)
    with Progress(*columns, **shown) as progress, ExitStack() as stack:
        bar, steps = progress.add_task("loading", total=None), sizes.add_task("capturing", total=None)

        def capturing(done: int, total: int) -> None:
            if done == 0:
                progress.stop()
                stack.enter_context(sizes)
            sizes.update(steps, completed=done, total=total)

        try:
            llm = LLM(
                model,
                device=device,
                dtype=dtype,
                progress=lambda count: progress.advance(bar, count),
                capturing=capturing,
                group=group,
                **chosen,
            )
        except (ValueError, OSError):
            if group is not None:
                group.close()  # or one of its threads may abort the process while it exits
            raise
    if group is None:
        _say_notes(llm)
        yield llm
        return
    try:
        if group.rank:
            while llm.assist():
                pass
            group.close()
            raise typer.Exit
        _say_notes(llm)
        try:
            yield llm
        except (ValueError, OSError):  # this rank's alone
            llm.close()
            raise
        llm.close()
        group.close()
    except KeyboardInterrupt:  # every rank's
        group.watchdog.close()
        raise


def _say_notes(llm: "LLM") -> None:
    for note in llm.notes:
        _say(f"note: {note}", "dim")


def _settings(pairs: list[str]) -> dict[str, Any]:
    settings = _pairs("--set", pairs)
    for key in ("device", "dtype"):
        if key in settings:
            raise ValueError(f"use --{key} instead of --set {key}={settings[key]}")
    return settings


def _pairs(option: str, pairs: list[str]) -> dict[str, Any]:
    """KEY=VALUE pairs; a value that reads as JSON (4096, true, null) is that, any other a string."""
    values: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ValueError(f"{option} must be KEY=VALUE, got {pair!r}")
        if key in values:
            raise ValueError(f"{key} is set twice")
        try:
            values[key] = json.loads(value)
        except ValueError:
            values[key] = value
    return values


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"the prompt on stdin must be UTF-8: {error}") from None


def _lines() -> Iterator[str]:
    """What the user enters: from a terminal with a prompt and line editing, ctrl-C or ctrl-D ending it."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\r\n") for line in sys.stdin)
        return
    try:
        import readline  # noqa: F401 (gives input() editing and history)
    except ImportError:
        pass
    while True:
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt):
            print(file=sys.stderr)
            return
        yield line


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _counts(stats: "Stats") -> dict[str, Any]:
    """All of the statistics but the record of each step."""
    return {field.name: getattr(stats, field.name) for field in fields(stats) if field.name != "steps"}


def _write_trace(llm: "LLM", file: TextIO) -> None:
    for record in llm.stats.steps:
        file.write(json.dumps(record) + "\n")


def _steps_table(stats: "Stats") -> Table:
    """What the steps did, by kind."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("", "steps", "tokens", "time", "tokens/s"):
        table.add_column(column, justify="right" if column else "left")
    for kind in ("prefill", "mixed", "decode"):
        steps = [record for record in stats.steps if record["kind"] == kind]
        if steps:
            tokens, seconds = sum(r["tokens"] for r in steps), sum(r["ms"] for r in steps) / 1e3
            table.add_row(kind, f"{len(steps)}", f"{tokens}", f"{seconds * 1e3:.0f} ms", f"{tokens / seconds:.0f}")
    table.add_row("memory rows read", "", f"{stats.memory_rows}")
    table.add_row("padding", "", f"{stats.padding_tokens}")
    table.add_row("cache pages", "", f"{stats.peak_pages} of {stats.num_pages}")
    return table
