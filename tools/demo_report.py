"""Measure a trained demo model and record it: `demo_report.py CORPUS MODEL RUN --results JSON --figure SVG`.

Held-out loss of the checkpoint as shipped (bf16 weights, float32 arithmetic) per source, with the n-gram memory on and
with its gate shut, and with attention restricted by the indexer; the training run's log (RUN/train.jsonl); the corpus
manifest. Each part is kept in the JSON file as soon as it is known; a part that is already there is not measured again.
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from demo_config import read_config
from demo_export import load_checkpoint
from demo_model import DemoModel
from rich.console import Console
from torch import Tensor
from train_demo import SOURCES, evaluate, held_out_windows

SPARSE_SOURCE = "austen"


def load(folder: Path, budget: int | None = None) -> DemoModel:
    """The checkpoint in float32; with a `budget` (tokens), attention is restricted to what the indexer chooses."""
    config = read_config(folder)
    model = DemoModel(config if budget is None else dataclasses.replace(config, indexer_budget=budget))
    load_checkpoint(model, folder)
    model.set_sparse(budget is not None)
    return model.eval()


def rounded(value: Any) -> Any:
    """Floats anywhere in `value` to four decimals."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return round(value, 4) if isinstance(value, float) else value


def training_curve(lines: list[dict[str, Any]]) -> str:
    """An SVG chart of training and held-out loss (nats per token) against steps."""
    width, height, left, top = 720, 360, 60, 20
    last = lines[-1]["step"]
    values = [line[key] for line in lines for key in ("train_nats_per_token", "nats_per_token")]
    low, high = min(values) // 0.5 * 0.5, -(-max(values) // 0.5) * 0.5

    def place(step: float, loss: float) -> str:
        x = left + step / last * (width - left - 20)
        y = top + (high - loss) / (high - low) * (height - top - 50)
        return f"{x:.1f},{y:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        "<style>text { font-size: 13px }</style>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for half in range(round((high - low) / 0.5) + 1):
        (x, y), (end, _) = (place(step, low + half / 2).split(",") for step in (0, last))
        parts.append(f'<line x1="{x}" y1="{y}" x2="{end}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8}" y="{y}" dy="4" text-anchor="end">{low + half / 2:.1f}</text>')
    for step in range(0, last + 1, 300):
        x, y = place(step, low).split(",")
        parts.append(f'<text x="{x}" y="{float(y) + 18:.1f}" text-anchor="middle">{step}</text>')
    curves = (("train_nats_per_token", "#888", "training"), ("nats_per_token", "#b3261e", "held out"))
    for row, (key, colour, label) in enumerate(curves):
        points = " ".join(place(line["step"], line[key]) for line in lines)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{width - 110}" y="{40 + 18 * row}" fill="{colour}">{label}</text>')
    best = min(lines, key=lambda line: line["nats_per_token"])
    x, y = place(best["step"], best["nats_per_token"]).split(",")
    parts.append(f'<circle cx="{x}" cy="{y}" r="5" fill="#b3261e"/>')
    parts.append(f'<text x="{x}" y="{float(y) - 12:.1f}" text-anchor="end">shipped: step {best["step"]}</text>')
    parts.append(f'<text x="{width / 2}" y="{height - 8}" text-anchor="middle">steps; loss in nats per token</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus", type=Path, help="folder with manifest.json and the token arrays")
    parser.add_argument("model", type=Path, help="checkpoint folder")
    parser.add_argument("run", type=Path, help="folder of the training run, with train.jsonl")
    parser.add_argument("--results", type=Path, required=True, help="JSON file to write or complete")
    parser.add_argument("--figure", type=Path, required=True, help="SVG file to write")
    options = parser.parse_args()
    console = Console(stderr=True)
    results = json.loads(options.results.read_text("utf-8")) if options.results.exists() else {}

    def record(key: str, value: Any) -> None:
        results[key] = rounded(value)
        options.results.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
        console.log(key)

    lines = [json.loads(line) for line in (options.run / "train.jsonl").read_text("utf-8").splitlines()]
    options.figure.write_text(training_curve(lines), "utf-8")
    record("corpus", json.loads((options.corpus / "manifest.json").read_text("utf-8")))
    record("training", lines)
    record("parameters", sum(parameter.numel() for parameter in load(options.model).parameters()))

    def arrays(length: int) -> dict[str, tuple[Tensor, Tensor]]:
        names = {source: options.corpus / f"tokens-heldout-{source}.npy" for source in SOURCES}
        return {source: held_out_windows(np.load(path), length) for source, path in names.items()}

    sizes = torch.from_numpy(np.load(options.corpus / "token-bytes.npy"))
    length = read_config(options.model).max_position_embeddings
    for key, memory in (("held_out", True), ("held_out_memory_shut", False)):
        if key not in results:
            model = load(options.model)
            model.set_memory(memory)
            record(key, evaluate(model, arrays(length), sizes))
    for budget in (1024, 512, 256):
        key = f"held_out_{SPARSE_SOURCE}_indexer_budget_{budget}"
        if key not in results:
            one = {SPARSE_SOURCE: arrays(length)[SPARSE_SOURCE]}
            record(key, evaluate(load(options.model, budget), one, sizes)["nats_per_token"])


if __name__ == "__main__":
    main()
