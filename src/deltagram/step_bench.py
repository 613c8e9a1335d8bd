"""`deltagram bench step`: what one step costs, whatever it mixes, and where its time goes."""

import html
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Table

from deltagram.engine.settings import find_device
from deltagram.engine.speculate import MAX_DRAFT
from deltagram.layers.basic import Factory
from deltagram.llm import shipped_model
from deltagram.models.base import Model
from deltagram.models.config import ModelConfig, Qwen35Config, read_config
from deltagram.models.hub import resolve_model
from deltagram.models.load import load_model
from deltagram.models.qwen3_5 import Qwen35
from deltagram.ngram.placement import Placement
from deltagram.testing.engram_model import engram_4b
from deltagram.testing.shapes import qwen3_5_config, randomise
from deltagram.testing.step_harness import DEVICE_STEPS, Mix, StepHarness

SHAPES = ("0.8B", "4B", "4B-engram")
WIDTH, LANE, GAP, LEFT = 1400, 36, 14, 110  # of the timeline, in pixels


class Launch(NamedTuple):
    """A kernel or copy of a step: microseconds from the step's first one."""

    name: str
    lane: int
    begin: float
    end: float


def step(
    model: Annotated[str, typer.Option(help=f"Checkpoint, hub id, or {', '.join(SHAPES)} with random weights.")] = "",
    batch: Annotated[int, typer.Option(min=0, help="Sequences that decode.")] = 1,
    context: Annotated[int, typer.Option(min=1, help="Tokens each of them has behind it.")] = 128,
    verify: Annotated[int, typer.Option(min=0, help="Drafted tokens of each sequence: it verifies 1 + this many.")] = 0,
    acceptance: Annotated[
        float, typer.Option(help="Tokens a verify step brings on average, 1 to 1 + verify; the next one replays them.")
    ] = 1.0,
    chunk: Annotated[int, typer.Option(min=0, help="Tokens of a prefill chunk beside them.")] = 0,
    placement: Annotated[str, typer.Option(help="Where n-gram tables live: docs/ngram-memory.md.")] = "device",
    run_ahead: Annotated[bool, typer.Option(help="Begin memory chains with the step.")] = True,
    eager: Annotated[bool, typer.Option(help="Run steps without capturing them.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    steps: Annotated[int, typer.Option(min=4, help="Steps that are timed.")] = 50,
    output: Annotated[Path | None, typer.Option("--json", help="File for the figures.")] = None,
    timeline: Annotated[Path | None, typer.Option(help="File (.svg) for a picture of one step's streams.")] = None,
) -> None:
    """Time a step of any mix on one GPU (or, slowly, a CPU)."""
    problems: list[str] = []
    where = find_device(device, problems)
    if not 0 <= verify <= MAX_DRAFT:
        problems.append(f"verify must be from 0 to {MAX_DRAFT}, got {verify}")
    elif not 1 <= acceptance <= 1 + verify:
        problems.append(f"acceptance must be from 1 to 1 + verify = {1 + verify}, got {acceptance:g}")
    mix = Mix(0 if verify else batch, batch if verify else 0, verify, (chunk,) if chunk else ())
    if not mix.num_tokens:
        problems.append("a step needs a batch or a chunk, got neither")
    eager = eager or where.type == "cpu"
    if timeline is not None and eager:
        problems.append("a timeline is of a captured step on a GPU; got an eager one")
    for file in (output, timeline):
        if file is not None and (file.is_dir() or not file.parent.is_dir()):
            problems.append(f"{file} cannot be written: expected a file in a folder that exists")
    try:
        Placement.parse(placement)
    except ValueError as error:
        problems.append(str(error))
    folder, config = find(model)
    more = max(chunk, (max(steps, DEVICE_STEPS) + 4) * (1 + verify))
    if context + more > config.max_position_embeddings:
        problems.append(
            f"context and what the steps add must be at most the model's {config.max_position_embeddings} positions, "
            f"got {context} + {more}"
        )
    if problems:
        raise ValueError("\n".join(problems))
    made = build(model, folder, config, where, context + more + 8192, placement)
    sizes = mix.num_sequences, context, mix.num_tokens, verify
    harness = StepHarness(made, where, *sizes, eager, run_ahead, more, acceptance)
    figures: dict[str, Any] = {"model": model or "shipped", "step": str(mix), **asdict(mix), "context": context}
    ahead = made.run_ahead is not None and made.run_ahead.stream is not None  # not on a CPU, nor without memory
    figures |= {"acceptance": acceptance, "placement": placement, "run_ahead": ahead}
    figures["bucket"] = str(harness.bucket(mix))
    if harness.runner.stream is not None and not eager:
        figures["capture_s"] = harness.capture([harness.bucket(mix)])
        assert harness.runner.graphs is not None
        figures["eager_segments"] = harness.runner.graphs.graphs[harness.bucket(mix)].num_eager
        figures["device_us"] = harness.device_us(mix)
    figures["wall_us"], figures["host_us"] = harness.step_us(mix, steps)
    figures["tokens_per_s"] = (mix.decode + mix.verify * acceptance) / figures["wall_us"] * 1e6
    table = Table("what", "figure")
    for name, value in figures.items():
        table.add_row(name, f"{value:.1f}" if isinstance(value, float) else str(value))
    Console(stderr=True).print(table)
    print(json.dumps(figures))
    if output is not None:
        output.write_text(json.dumps(figures, indent=1) + "\n")
    if timeline is not None:
        timeline.write_text(draw(launches_of(harness, mix), f"{figures['model']}: {mix}, {placement}"))


def find(name: str) -> tuple[Path | None, ModelConfig]:
    """The folder and the config of a checkpoint; of one of SHAPES, its config."""
    if name in SHAPES:
        return None, qwen3_5_config(name.removesuffix("-engram"))
    folder = resolve_model(name) if name else shipped_model()
    return folder, read_config(folder)


def build(
    name: str, folder: Path | None, config: ModelConfig, device: torch.device, max_context: int, placement: str
) -> Model:
    """The model that was found: with random weights, or a checkpoint's."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if name == "4B-engram":
        return engram_4b(max_context, device, Placement.parse(placement))
    if folder is None:
        assert isinstance(config, Qwen35Config)
        model = Qwen35(config, max_context, Factory(device, dtype))
        randomise(model)
        return model
    return load_model(folder, config, config.max_position_embeddings, device, dtype, None, placement)[0]


def launches_of(harness: StepHarness, mix: Mix) -> list[Launch]:
    """What one captured step puts on the device, by stream: the main one is lane 0. Needs a captured step."""
    assert harness.runner.graphs is not None
    requests = harness.begin(mix)
    harness.runner.retire(harness.runner.launch(harness.plan(mix, requests)))
    graph = harness.runner.graphs.graphs[harness.bucket(mix)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(2):
            graph.replay()
        torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda event: event.time_range.start)
    events = events[len(events) // 2 :]  # the second replay
    busy: dict[int, int] = defaultdict(int)
    for event in events:
        busy[event.thread] += 1
    lanes = {stream: lane for lane, stream in enumerate(sorted(busy, key=lambda stream: -busy[stream]))}
    first = events[0].time_range.start
    return [Launch(e.name, lanes[e.thread], e.time_range.start - first, e.time_range.end - first) for e in events]


def draw(launches: Sequence[Launch], title: str) -> str:
    """A picture of a step (SVG): a lane a stream, a box a kernel, its name and time when pointed at."""
    end = max(launch.end for launch in launches)
    lanes = 1 + max(launch.lane for launch in launches)
    height = 40 + lanes * (LANE + GAP) + 30
    scale = (WIDTH - LEFT - 20) / end
    colours: dict[str, str] = {}
    boxes = []
    for name, lane, begin, finish in launches:
        kind = name.split("(")[0].split("<")[0]
        colour = colours.setdefault(kind, f"hsl({len(colours) * 47 % 360} 60% 60%)")
        top = 40 + lane * (LANE + GAP)
        shape = f'x="{LEFT + begin * scale:.2f}" y="{top}" width="{max((finish - begin) * scale, 0.5):.2f}"'
        tip = html.escape(f"{kind}: {finish - begin:.1f} us at {begin:.1f}")
        boxes.append(f'<rect {shape} height="{LANE}" fill="{colour}"><title>{tip}</title></rect>')
    names = ["main stream", *(["memory ahead"] if lanes > 1 else []), *["copies"] * lanes]
    labels = [
        f'<text x="8" y="{40 + lane * (LANE + GAP) + LANE / 2 + 4}">{names[lane]}</text>' for lane in range(lanes)
    ]
    ticks = [
        f'<text x="{LEFT + share * end * scale:.0f}" y="{height - 8}" text-anchor="middle">{share * end:.0f} us</text>'
        for share in (0, 0.25, 0.5, 0.75, 1)
    ]
    style = "<style>text{font:12px sans-serif;fill:#777}</style>"
    heading = f'<text x="8" y="22">{html.escape(title)}</text>'
    body = "\n".join([style, heading, *labels, *boxes, *ticks])
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}">\n{body}\n</svg>\n'


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(step)
