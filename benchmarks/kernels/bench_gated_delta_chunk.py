"""Prompts of several shapes through the chunked rule, against flash-linear-attention where it is installed.

python benchmarks/kernels/bench_gated_delta_chunk.py
"""

from typing import Any

import torch
import torch.nn.functional as F

from deltagram.kernels.gated_delta_chunk import CHUNK, gated_delta_chunk
from deltagram.testing.timing import captured_us, eager_us

H, HV, K, V = 16, 32, 128, 128
SHAPES = ((1, 64), (1, 1024), (16, 128), (1, 8192), (64, 128))  # sequences, tokens each


def case(sequences: int, length: int) -> tuple[Any, Any]:
    """A call of ours and one of the peer's (None without it) on the same inputs, from a state."""
    torch.manual_seed(0)
    total = sequences * length
    q, k = (F.normalize(torch.randn(total, H, K, device="cuda"), dim=-1).bfloat16() for _ in range(2))
    v = torch.randn(total, HV, V, device="cuda").bfloat16()
    g, beta = -torch.rand(total, HV, device="cuda") * 0.1, torch.rand(total, HV, device="cuda")
    state = torch.randn(sequences, HV, V, K, device="cuda") * 0.1
    per = -(-length // CHUNK)
    chunks = torch.tensor([(n, i) for n in range(sequences) for i in range(per)], dtype=torch.int32, device="cuda")
    kind = torch.full((sequences,), 2, dtype=torch.int32, device="cuda")
    cu_tokens = torch.arange(sequences + 1, dtype=torch.int32, device="cuda") * length
    start, slot = torch.full_like(kind, 64), torch.arange(sequences, dtype=torch.int32, device="cuda")
    out = torch.empty_like(v)

    def ours() -> torch.Tensor:
        gated_delta_chunk(q, k, v, g, beta, state, chunks, kind, cu_tokens, start, slot, out)
        return out

    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError:
        return ours, None
    initial, lengths = state.transpose(2, 3).contiguous(), cu_tokens.long()
    inputs = [x[None] for x in (q, k, v, g, beta)]

    @torch.inference_mode()
    def theirs() -> torch.Tensor:
        return chunk_gated_delta_rule(
            *inputs, scale=1.0, initial_state=initial, output_final_state=True, cu_seqlens=lengths
        )[0][0]

    return ours, theirs


def measure() -> list[Any]:
    rows = []
    for sequences, length in SHAPES:
        ours, theirs = case(sequences, length)
        row = {"sequences": sequences, "tokens_each": length}
        if theirs is not None:  # once, on the same state: ours then moves it on
            expected = theirs()
            row["difference"] = ((ours() - expected).float().norm() / expected.float().norm()).item()
        row |= {"us": captured_us([ours] * 4), "eager_host_us": eager_us([ours] * 4)[0]}
        if theirs is not None:
            row["fla_us"] = captured_us([theirs] * 4)
            row["of_fla"] = row["us"] / row["fla_us"]
        rows.append(row)
    return rows


if __name__ == "__main__":
    for row in measure():
        print(row)
