"""Products with a weight. On a CPU: a bf16 weight of 1024 x 256, compiled and as the reference runs it. On a GPU: those
of a 4B and a 0.8B model for few rows, with the norm that follows where there is one, beside the library's product
alone, over weights that no cache holds.

python benchmarks/kernels/bench_linear.py
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from deltagram.kernels._norm import Norm
from deltagram.kernels.linear import linear, linear_onto
from deltagram.testing.compiled import print_times, weight
from deltagram.testing.timing import captured_us

SHAPES = {  # outputs, inputs, whether it adds to the residual, with a norm
    "4B in_proj": (12352, 2560, False), "4B out_proj": (2560, 4096, True), "4B head": (248320, 2560, False),
    "0.8B in_proj": (8224, 1024, False), "0.8B out_proj": (1024, 2048, True), "0.8B head": (248320, 1024, False),
}  # fmt: skip


def measure() -> list[dict[str, Any]]:
    results = []
    for name, (outputs, inputs, adds) in SHAPES.items():
        copies = max(2, 200_000_000 // (2 * outputs * inputs))
        weights = [
            torch.empty(outputs, inputs, device="cuda", dtype=torch.bfloat16).normal_(std=inputs**-0.5)
            for _ in range(copies)
        ]
        norm = Norm(torch.rand(outputs, device="cuda"), 1e-6)
        for rows in (1, 8, 16, 48):
            x = torch.randn(rows, inputs, device="cuda").bfloat16()
            residual = torch.randn(rows, outputs, device="cuda").bfloat16()
            ours = captured_us(
                [partial(linear_onto, residual, x, one, norm) if adds else partial(linear, x, one) for one in weights]
            )
            library = captured_us([partial(F.linear, x, one) for one in weights])
            row = {"product": name, "rows": rows, "us": ours, "library_alone_us": library}
            results.append(row | {"tb_per_s": weights[0].nbytes / ours / 1e6})
    return results


if __name__ == "__main__":
    torch.manual_seed(0)
    packed = weight(1024, 256)
    print_times(
        linear,
        {f"{rows} rows": (torch.randn(rows, 256), packed) for rows in (1, 8, 512)},
    )
    for row in measure() if torch.cuda.is_available() else ():
        print(row)
