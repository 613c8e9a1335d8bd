"""Whole captured steps of the 0.8B and 4B shapes on a GPU: beside their weights' bytes, memory ahead and inline, mixed.

    python benchmarks/step.py [--parts decode prefill memory mixed start] [--placements device host]

Contexts begin with 128 tokens, and grow by what each step that is timed brings. Times "device" are replays back to
back, "wall" from one step's end to the next one's with the host's work in between, "host" that work. Of mixed steps
these two are the least of several rounds, seconds apart, of which each median is listed: processors that others use
too take more than twice as long for the same work now and then. Writes results/step_<part>.json after each part.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from environment import save
from torch import Tensor

from deltagram.layers.basic import Factory
from deltagram.models.qwen3_5 import Qwen35
from deltagram.ngram.placement import Placement
from deltagram.ngram.run_ahead import RunAhead
from deltagram.step.history import TokenHistory
from deltagram.step.sequences import SequenceTable
from deltagram.testing.engram_model import EngramModel, engram_4b
from deltagram.testing.shapes import qwen3_5_config, randomise
from deltagram.testing.step_harness import Mix, StepHarness

BANDWIDTH = 4.27e6  # bytes a microsecond: a copy within an H200's memory, bytes read and written
CUDA = torch.device("cuda")
CONTEXT = 128
ROUNDS = 7


def plain(shape: str) -> Qwen35:
    model = Qwen35(qwen3_5_config(shape), 8192, Factory(CUDA, torch.bfloat16))
    randomise(model)
    return model


def weight_bytes(model: Qwen35) -> int:
    return sum(part.nbytes for weight in model.weights({}).values() for part in weight.parts)


def measured(harness: StepHarness, mix: Mix) -> dict[str, Any]:
    wall, host = harness.step_us(mix)
    return {"device us": harness.device_us(mix), "wall us": wall, "host us": host}


def captured(model: Any, sequences: int, tokens: int, mixes: list[Mix], **options: Any) -> StepHarness:
    harness = StepHarness(model, CUDA, sequences, CONTEXT, tokens, **options)
    buckets = sorted({harness.bucket(mix) for mix in mixes}, key=lambda bucket: -bucket.tokens)
    harness.capture(buckets)
    return harness


def decode() -> dict[str, Any]:
    results: dict[str, Any] = {}
    for shape in ("4B", "0.8B"):
        model = plain(shape)
        floor = weight_bytes(model) / BANDWIDTH
        mixes = [Mix(decode=count) for count in (1, 8, 16, 48)]
        harness = captured(model, 48, 128, mixes)
        for mix in mixes:
            times = measured(harness, mix)
            results[f"{shape}, {mix}"] = times | {"of weight bytes": times["device us"] / floor, "floor us": floor}
            print(shape, mix, results[f"{shape}, {mix}"], flush=True)
        del harness, model
        clear()
    return results


def prefill() -> dict[str, Any]:
    mix = Mix(chunks=(2048,))
    harness = StepHarness(plain("4B"), CUDA, 2, 0, 2048)
    harness.capture([harness.bucket(mix)])
    return {"4B, a prompt of 2048": measured(harness, mix)}


class Given:
    """In place of the chains: keys and values that are there already."""

    exchange, stream, stores = None, None, ()

    def __init__(self, model: EngramModel) -> None:
        self.sizes, self.made = (model.num_streams, model.config.hidden_size), {}

    def start(self, table: SequenceTable, history: TokenHistory) -> None:
        self.tokens = table.bucket.tokens

    def take(self, layer: int) -> tuple[Tensor, Tensor]:
        streams, size = self.sizes
        key = self.tokens, layer
        if key not in self.made:
            self.made[key] = (
                torch.zeros(self.tokens, streams, size, dtype=torch.bfloat16, device=CUDA),
                torch.zeros(self.tokens, size, dtype=torch.bfloat16, device=CUDA),
            )
        return self.made[key]

    def finish(self) -> None: ...

    def wake(self) -> None: ...

    def check(self) -> None: ...

    def go_ahead(self, ahead: bool) -> None: ...


def memory(placements: list[str]) -> dict[str, Any]:
    """Steps of T decode sequences with both chains ahead, inline, and given; the most there may be is the step with
    both given and the projections' bytes on top."""
    results: dict[str, Any] = {}
    mixes = [Mix(decode=count) for count in (1, 6, 16, 48, 96)]
    for placement in placements:
        began = time.perf_counter()
        model = engram_4b(2048, CUDA, Placement.parse(placement))
        print(f"tables in place after {time.perf_counter() - began:.0f} s", flush=True)
        chains = model.run_ahead
        assert isinstance(chains, RunAhead)
        projections = sum(engram.projection.wkv.weight.nbytes for engram in model.engrams.values())
        for name in ("given", "ahead", "inline"):
            model.run_ahead = Given(model) if name == "given" else chains  # type: ignore[assignment]
            harness = StepHarness(model, CUDA, 96, CONTEXT, 160, run_ahead=name == "ahead")
            harness.capture(sorted({harness.bucket(mix) for mix in mixes}, key=lambda bucket: -bucket.tokens))
            for mix in mixes:
                results.setdefault(f"{placement}, {mix}", {})[name] = harness.device_us(mix, steps=20)
            del harness
            clear()
        for mix in mixes:
            entry = results[f"{placement}, {mix}"]
            entry["allowed us"] = (entry["given"] + projections / BANDWIDTH) * 1.02
            entry["of allowed"] = entry["ahead"] / entry["allowed us"]
            print(placement, mix, entry, flush=True)
        del model, chains
        clear()
    return results


def mixed() -> dict[str, Any]:
    results: dict[str, Any] = {}
    model = plain("4B")
    mixes = [Mix(48, 4, 5, (size,)) for size in (64, 512, 2048)]
    harness = captured(model, 56, 2048 + 48 + 24, mixes, max_draft=5, acceptance=3.5)
    assert harness.runner.graphs is not None
    for mix in mixes:
        segments = harness.runner.graphs.graphs[harness.bucket(mix)].num_eager
        results[f"4B, {mix}"] = {"device us": harness.device_us(mix), "eager segments": segments}
    rounds = [[harness.step_us(mix) for mix in mixes] for _ in range(ROUNDS)]
    for mix, of_mix in zip(mixes, zip(*rounds, strict=True), strict=True):
        walls, hosts = zip(*of_mix, strict=True)
        results[f"4B, {mix}"] |= {"wall us": min(walls), "host us": min(hosts), "host us of rounds": hosts}
    del harness
    clear()
    eager = StepHarness(model, CUDA, 56, CONTEXT, 2048 + 48 + 24, max_draft=5, acceptance=3.5, eager=True)
    walls, hosts = zip(*(eager.step_us(mixes[0], steps=12) for _ in range(ROUNDS)), strict=True)
    results[f"4B, {mixes[0]}"] |= {"eager wall us": min(walls), "eager host us": min(hosts)}
    for name, times in results.items():
        print(name, times, flush=True)
    return results


def start() -> dict[str, Any]:
    """From nothing to every bucket captured, in a process of its own: with no kernel compiled yet, then with all of
    them in their cache. `process s` has the interpreter's start and its imports too."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"TRITON_CACHE_DIR": cache}
        for name in ("cold", "warm"):
            began = time.perf_counter()
            command = [sys.executable, __file__, "--parts", "ready"]
            done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
            results[name] = json.loads(done.stdout) | {"process s": time.perf_counter() - began}
            print(name, results[name], flush=True)
    return results


def ready() -> dict[str, Any]:
    """From random weights to ready, in this process."""
    began = time.perf_counter()
    harness = StepHarness(plain("4B"), CUDA, 16, CONTEXT, 512)
    made = time.perf_counter() - began
    seconds = harness.capture()
    assert harness.runner.graphs is not None
    count, size = len(harness.runner.graphs.graphs), harness.runner.graphs.bytes
    return {"model s": made, "capture s": seconds, "graphs": count, "graph bytes": size}


def clear() -> None:
    gc.collect()
    torch.cuda.empty_cache()


@contextmanager
def timed(name: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", nargs="+", default=["start", "decode", "prefill", "mixed", "memory"])
    parser.add_argument("--placements", nargs="+", default=["device", "host"])
    options = parser.parse_args()
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "start": start, "decode": decode, "prefill": prefill, "mixed": mixed,
        "memory": lambda: memory(options.placements),
    }  # fmt: skip
    if options.parts == ["ready"]:  # a child of `start`
        print(json.dumps(ready()))
        sys.exit()
    for part in options.parts:
        with timed(part):
            save(f"step_{part}", parts[part]())
