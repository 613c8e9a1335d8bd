"""Decode steps of whole models with random weights, captured, beside the time that their weights' bytes take.

    python benchmarks/decode_layers.py [--shapes 4B 0.8B] [--batches 1 8 48] [--prefill 2048] [--no-attention]

A step is the forward pass and the logits, on contexts that stay at 64 tokens, where those of step.py begin with 128 and
grow; the sequence table is made before it and sampling comes after it. Kernels are listed in the order a layer launches
them, each with the time by which it put off the step's end: from the end of the kernel before it to its own. Writes
results/decode_layers.json.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from environment import save
from torch import Tensor

from deltagram.attention.cache import LayerCache, page_size
from deltagram.gdn.core import LayerState
from deltagram.gdn.state import STORED_EVERY, allocate, recent_rings, ring_length
from deltagram.layers.basic import Factory
from deltagram.models.config import Qwen35Config, parse_config
from deltagram.models.qwen3_5 import Qwen35
from deltagram.step.history import TokenHistory
from deltagram.step.plan import Bucket, Entry, Kind, StepPlan
from deltagram.step.sequences import SequenceTable, pack, prepare
from deltagram.testing.timing import launches

BANDWIDTH = 4.27  # TB/s, of a copy between two places of an H200's memory, bytes read and written
CONTEXT = 64
DEVICE = torch.device("cuda")
COMMON = {
    "model_type": "qwen3_5_text", "vocab_size": 248320, "head_dim": 256, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096, "tie_word_embeddings": True, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16, "eos_token_id": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}  # fmt: skip
SHAPES = {
    "4B": {
        "hidden_size": 2560, "num_hidden_layers": 32, "intermediate_size": 9216, "num_attention_heads": 16,
        "num_key_value_heads": 4, "linear_num_value_heads": 32,
    },
    "0.8B": {
        "hidden_size": 1024, "num_hidden_layers": 24, "intermediate_size": 3584, "num_attention_heads": 8,
        "num_key_value_heads": 2, "linear_num_value_heads": 16,
    },
}  # fmt: skip


def config_of(shape: str, attention: bool) -> Qwen35Config:
    values: dict[str, Any] = COMMON | SHAPES[shape]
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    values["layer_types"] = kinds * (values["num_hidden_layers"] // 4)
    if not attention:
        values["layer_types"] = [kind for kind in values["layer_types"] if kind != "full_attention"]
        values["num_hidden_layers"] = len(values["layer_types"])
    config = parse_config(values)
    assert isinstance(config, Qwen35Config)
    return config


class Step:
    """A model with random weights, or the `model` given, and pools for `requests`; and steps of it."""

    def __init__(self, config: Qwen35Config, requests: int, model: Qwen35 | None = None) -> None:
        self.requests = requests
        self.model = model or Qwen35(config, 4096, Factory(DEVICE, torch.bfloat16))
        self.weight_bytes = 0
        for weight in self.model.weights({}).values():
            for tensor in weight.parts:
                scale = tensor.shape[-1] ** -0.5 if tensor.dim() > 1 else 0.1
                if model is None:
                    tensor.normal_(std=scale)
                self.weight_bytes += tensor.nbytes
        for layer in self.model.linear_layers:
            state = layer.num_value_heads, layer.value_dim, layer.key_dim
            ring = ring_length(layer.conv_reach, 0), layer.channels
            heads = layer.num_key_heads, *state
            layer.state = LayerState(
                allocate(requests, state, torch.float32, DEVICE, False),
                allocate(requests, ring, torch.bfloat16, DEVICE, False),
                recent_rings(requests, STORED_EVERY, 0, *heads, torch.bfloat16, DEVICE, False),
            )
        self.page = page_size(1)
        pages = 4096 // self.page
        for attention in self.model.attention_layers:
            size = max(requests * 2, pages) + 1, self.page, attention.num_kv_heads, attention.head_dim
            attention.cache = LayerCache(*torch.zeros(2, *size, dtype=torch.bfloat16, device=DEVICE))

    def table(self, kind: Kind, tokens: int) -> tuple[SequenceTable, TokenHistory]:
        """Of a decode step of `tokens` requests, or of one prompt."""
        count = tokens if kind is Kind.DECODE else 1
        begun = CONTEXT if kind is Kind.DECODE else 0
        history = TokenHistory(self.requests + 1, 4096, DEVICE, STORED_EVERY)
        history.tokens.random_(0, 1000)
        history.lengths.fill_(begun + tokens // count)
        if count > history.few:  # long after a prompt
            history.untaken.copy_((begun + torch.arange(self.requests + 1) - 1) % STORED_EVERY)
        entries = tuple(Entry(i, 0, i, kind, tokens // count, begun) for i in range(count))
        plan = StepPlan(0, Bucket(tokens, count, kind is Kind.PREFILL), entries)
        packed = torch.from_numpy(pack(plan, self.page, self.requests, self.requests)).to(DEVICE)
        pages = torch.arange(4096 // self.page, device=DEVICE, dtype=torch.int32).repeat(self.requests + 1, 1)
        if kind is Kind.DECODE:  # each its own: their contexts fill less than two
            own = torch.arange(2 * self.requests, device=DEVICE, dtype=torch.int32)
            pages[: self.requests, :2] = own.view(-1, 2)
        return prepare(packed, plan.bucket, history, pages, self.page), history

    def call(self, kind: Kind, tokens: int) -> Callable[[], Tensor]:
        table, history = self.table(kind, tokens)
        last = torch.tensor([tokens - 1], device=DEVICE) if kind is Kind.PREFILL else None

        def run() -> Tensor:
            return self.model.logits(self.model.forward(table, history, last))

        return run


def capture(run: Callable[[], Tensor]) -> torch.cuda.CUDAGraph:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph, replays: int = 40) -> float:
    """Median device time of a replay that follows another, as decode steps do."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    for _ in range(3):
        graph.replay()
    for event in events:
        event.record()
        graph.replay()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) * 1e3 for a, b in pairwise(events))


def timeline(graph: torch.cuda.CUDAGraph) -> list[tuple[str, float]]:
    """Each kernel of a replay, and how many microseconds after the one before it ended."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graph.replay()
        torch.cuda.synchronize()
    found = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    found.sort(key=lambda e: e.time_range.end)
    ends = [e.time_range.end for e in found]
    starts = [found[0].time_range.start, *ends]
    return [(e.name, end - start) for e, start, end in zip(found, starts, ends, strict=False)]


def by_layer(step: Step, run: Callable[[], Tensor], graph: torch.cuda.CUDAGraph, tokens: int) -> dict[str, Any]:
    """The timeline's kernels, averaged over the layers of a kind."""
    table, _ = step.table(Kind.DECODE, tokens)
    x = step.model.embedding(table.token)
    normed = step.model.norms[0](x)
    counts = {}
    for layer, following in zip(step.model.layers, step.model.norms[1:], strict=True):
        kind = "attention" if layer.mixer in step.model.attention_layers else "linear"
        if kind not in counts:
            counts[kind] = launches(partial(layer, x, normed, table, step.model.rotary, None, following))
    events = timeline(graph)
    kinds = ["attention" if layer.mixer in step.model.attention_layers else "linear" for layer in step.model.layers]
    total = sum(counts[kind] for kind in kinds)
    rest = len(events) - total
    found: dict[str, Any] = {"launches": len(events), "launches_a_layer": counts}
    if rest < 0:
        return found | {"note": "the layers' launches could not be told apart"}
    before = 2  # the embedding and its norm
    sums = {kind: [0.0] * counts[kind] for kind in counts}
    names = {kind: [""] * counts[kind] for kind in counts}
    at = before
    for kind in kinds:
        for j in range(counts[kind]):
            names[kind][j] = events[at][0][:40]
            sums[kind][j] += events[at][1] / kinds.count(kind)
            at += 1
    for kind in counts:
        found[kind] = [(name, round(us, 2)) for name, us in zip(names[kind], sums[kind], strict=True)]
        found[f"{kind}_us"] = round(sum(sums[kind]), 2)
    found["around"] = [(name[:40], round(us, 2)) for name, us in events[:before] + events[at:]]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 8, 48])
    parser.add_argument("--prefill", nargs="*", type=int, default=[2048])
    parser.add_argument("--no-attention", action="store_true", help="leave the attention layers out")
    options = parser.parse_args()
    results = []
    with torch.inference_mode():
        for shape in options.shapes:
            step = Step(config_of(shape, not options.no_attention), max(options.batches))
            floor = step.weight_bytes / BANDWIDTH / 1e6
            for batch in options.batches:
                run = step.call(Kind.DECODE, batch)
                graph = capture(run)
                us = replay_us(graph)
                row = {"shape": shape, "decode": batch, "us": us, "weight_bytes": step.weight_bytes}
                row |= {"weights_us": floor, "of_weights": us / floor, "with_attention": not options.no_attention}
                results.append(row | by_layer(step, run, graph, batch))
                print(shape, "decode", batch, round(us, 1), "us", round(us / floor, 3), "of its weights")
            for tokens in options.prefill:
                graph = capture(step.call(Kind.PREFILL, tokens))
                results.append({"shape": shape, "prefill": tokens, "us": replay_us(graph, 8)})
                print(shape, "prefill", tokens, round(results[-1]["us"] / 1e3, 2), "ms")
            del step
    print(save("decode_layers", results))


if __name__ == "__main__":
    main()
