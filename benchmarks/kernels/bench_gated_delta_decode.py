"""A Gated DeltaNet layer's core for one decode token of 1 to 64 sequences: in one launch, and op by op.

Layers of a 4B model's shape, each with weights and pools of its own. State traffic counts one read and one write.

    python benchmarks/kernels/bench_gated_delta_decode.py
"""

from typing import Any

import torch

from deltagram.gdn import core
from deltagram.step.plan import Bucket, Kind
from deltagram.testing.core_steps import CoreShape, CoreSteps, Part
from deltagram.testing.timing import captured_us

SHAPE, LAYERS, SIZES = CoreShape(16, 32, 128, 128), 12, (1, 2, 4, 8, 16, 32, 48, 64)


def measure() -> list[dict[str, Any]]:
    device = torch.device("cuda")
    layers = [CoreSteps(SHAPE, max(SIZES), torch.bfloat16, device, seed=i) for i in range(LAYERS)]
    for layer in layers:
        for pool in layer.pools():
            pool.normal_(std=0.1)
    results = []
    for n in SIZES:
        parts = [Part(layers[0].stream(1, slot), Kind.DECODE) for slot in range(n)]
        bucket = Bucket(n, n, False)
        rows = layers[0].rows(parts, bucket)
        for part in parts:  # as if they had come a long way
            part.stream.done = 1000
        table = layers[0].table(parts, bucket)
        row: dict[str, Any] = {"sequences": n}
        for name, body in (("us", core._at_once), ("op_by_op_us", core._op_by_op)):

            def call(layer: CoreSteps, body: Any = body, table: Any = table, rows: torch.Tensor = rows) -> None:
                qkv, a, b, _ = rows.split(layer._sizes(), 1)
                body(table, qkv, a, b, layer.weights, layer.state, None, None)

            row[name] = captured_us([lambda layer=layer, call=call: call(layer) for layer in layers])
        traffic = 2 * n * SHAPE.value_heads * SHAPE.value_dim * SHAPE.key_dim * 4
        results.append(row | {"state_tb_per_s": traffic / row["us"] / 1e6})
    return results


if __name__ == "__main__":
    for row in measure():
        print(row)
