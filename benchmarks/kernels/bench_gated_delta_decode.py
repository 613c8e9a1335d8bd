"""A Gated DeltaNet layer's core for decode and verify sequences: in one launch, and op by op; and, if it is installed,
flash-linear-attention's recurrence alone, for the same states.

Layers of a 4B model's shape, each with weights and pools of its own. State traffic counts one read, and a write
where a state is stored.

    python benchmarks/kernels/bench_gated_delta_decode.py

Writes results/gated_delta_decode_cuda.json.
"""

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from environment import save
from kernels import bench_gated_delta_recurrent

from deltagram.gdn import core
from deltagram.gdn.state import STORED_EVERY
from deltagram.kernels._gates import FEW_STATES
from deltagram.step.plan import Bucket, Kind
from deltagram.testing.core_steps import CoreShape, CoreSteps, Part
from deltagram.testing.timing import captured_us

SHAPE, LAYERS = CoreShape(16, 32, 128, 128), 12
DECODE, VERIFY = (1, 2, 4, 8, 16, 32, 48, 64, 128, 256), (1, 8, 48)
DRAFTS = 5


def measure(state_dtype: torch.dtype = torch.float32, sizes: tuple[int, ...] = DECODE) -> list[dict[str, Any]]:
    """One row a number of sequences that decode."""
    layers = _layers(state_dtype, max(sizes), 0)
    rows = [_times(layers, n, 1) for n in sizes]
    if state_dtype is torch.float32:
        del layers
        sizes_of_state = SHAPE.value_heads, SHAPE.value_dim, SHAPE.key_dim
        pool = torch.randn(bench_gated_delta_recurrent.SLOTS, *sizes_of_state, device="cuda")
        for row in rows:
            theirs = bench_gated_delta_recurrent.calls(row["sequences"], pool)[1]
            if theirs:
                row["fla_recurrence_us"] = captured_us(theirs)
    return rows


def measure_verify() -> list[dict[str, Any]]:
    """Sequences of one token and of 1 + DRAFTS, with rings, where half of the last drafts were accepted."""
    layers = _layers(torch.float32, max(VERIFY), DRAFTS)
    return [_times(layers, n, tokens) for n in VERIFY for tokens in (1, 1 + DRAFTS)]


def _layers(state_dtype: torch.dtype, slots: int, drafts: int) -> list[CoreSteps]:
    device = torch.device("cuda")
    sizes = SHAPE, slots, torch.bfloat16, device, drafts, state_dtype
    layers = [CoreSteps(*sizes, seed=i, every=STORED_EVERY, few=FEW_STATES) for i in range(LAYERS)]
    for layer in layers:
        for pool in layer.pools():
            pool.normal_(std=0.1)
    return layers


def _times(layers: list[CoreSteps], n: int, tokens: int) -> dict[str, Any]:
    kind = Kind.VERIFY if tokens > 1 else Kind.DECODE
    parts = [Part(layers[0].stream(tokens, slot), kind, tokens) for slot in range(n)]
    bucket = Bucket(n * tokens, n, False)
    rows = layers[0].rows(parts, bucket)
    layers[0].come_a_long_way(parts, tokens // 2)
    table = layers[0].table(parts, bucket)
    result: dict[str, Any] = {"sequences": n, "tokens_each": tokens}
    for name, body in (("us", core._at_once), ("op_by_op_us", core._op_by_op)):

        def call(layer: CoreSteps, body: Any = body) -> None:
            qkv, a, b, _ = rows.split(layer._sizes(), 1)
            body(table, qkv, a, b, layer.weights, layer.state, None, None)

        result[name] = captured_us([lambda layer=layer, call=call: call(layer) for layer in layers])
    return result | {"state_tb_per_s": layers[0].state_traffic(table) / result["us"] / 1e6}


if __name__ == "__main__":
    results = {"decode": measure(), "verify": measure_verify()}
    for row in results["decode"] + results["verify"]:
        print(row)
    print(save("gated_delta_decode_cuda", results))
