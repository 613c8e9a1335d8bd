"""The convolution for decode steps and prompts, in time and in bytes of inputs and outputs.

python benchmarks/kernels/bench_causal_conv1d.py
"""

from typing import Any

import torch

from deltagram.kernels.causal_conv1d import causal_conv1d
from deltagram.step.plan import Bucket, Kind
from deltagram.testing.core_steps import CoreShape, CoreSteps, Part, Stream
from deltagram.testing.timing import captured_us, eager_us

SHAPES = ((1, 1), (64, 1), (1, 1024), (1, 8192), (16, 128))  # sequences, tokens each


def measure() -> list[Any]:
    steps = CoreSteps(CoreShape(16, 32, 128, 128), 64, torch.bfloat16, torch.device("cuda"), max_draft=5)
    rows = []
    for sequences, length in SHAPES:
        empty = torch.empty(0)
        kind = Kind.DECODE if length == 1 else Kind.PREFILL
        parts = [Part(Stream(empty, empty, empty, slot, done=7), kind, length) for slot in range(sequences)]
        t = steps.table(parts, Bucket(sequences * length, sequences, length > 1))
        x = torch.randn(sequences * length, steps.shape.channels, device="cuda").bfloat16()

        def call(t: Any = t, x: torch.Tensor = x) -> None:
            index = t.cu_tokens, t.sequence, t.position, t.start, t.slot
            causal_conv1d(x, steps.conv_weight, steps.state.conv, *index)

        time = captured_us([call] * 8)
        row = {"sequences": sequences, "tokens_each": length, "us": time, "eager_host_us": eager_us([call] * 8)[0]}
        rows.append(row | {"tb_per_s": 2 * x.nbytes / time / 1e6})
    return rows


if __name__ == "__main__":
    for row in measure():
        print(row)
