"""Attention of 4 heads of 64 over 2 key heads: one token, and a prompt of 512, compiled and as the reference runs it.

python benchmarks/kernels/bench_paged_attention.py
"""

import torch

from deltagram.kernels.paged_attention import paged_attention
from deltagram.testing.compiled import print_times


def case(context: int, new: int) -> tuple[object, ...]:
    k, v = torch.randn(2, -(-context // 64), 64, 2, 64)
    table, row = torch.arange(len(k), dtype=torch.int32)[None], torch.zeros(1, dtype=torch.int32)
    cu_tokens, length = torch.tensor([0, new], dtype=torch.int32), torch.tensor([context], dtype=torch.int32)
    position, sequence = torch.arange(context - new, context, dtype=torch.int32), torch.zeros(new, dtype=torch.int32)
    return torch.randn(new, 4, 64), k, v, table, row, row, cu_tokens, length, sequence, position, 0.125


if __name__ == "__main__":
    cases = ((128, 1), (2048, 1), (512, 512))
    print_times(paged_attention, {f"{new} of {context}": case(context, new) for context, new in cases})
