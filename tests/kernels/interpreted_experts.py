"""Run in a process of its own by test_moe.py: the kernels of Qwen4-Exp's own ops under Triton's interpreter, against
their references.

It checks masks and indices: everything that is not read is NaN, and sizes are odd.
"""

import torch
from test_derive_table import PAGE, step

from deltagram.kernels.derive_table import derive_table
from deltagram.kernels.hyper_add import hyper_add
from deltagram.kernels.hyper_mix import hyper_mix
from deltagram.kernels.moe import moe
from deltagram.kernels.moe import triton as experts
from deltagram.kernels.ple_gate import ple_gate
from deltagram.testing.compiled import among_nan
from deltagram.testing.interpreter import take_one_element_as_index

take_one_element_as_index()
torch.utils.deterministic.fill_uninitialized_memory = True
torch.use_deterministic_algorithms(True)  # scratch and outputs start as NaN
torch.manual_seed(0)


def close(ours, theirs) -> None:
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)


for seed in range(12):
    packed, num_rows = step(seed, seed % 2 == 0)
    written = [[tensor.clone() for tensor in packed[-2:]] for _ in range(2)]
    ours, theirs = (
        derive_table(*packed[:-2], *mine, PAGE, 1 + seed % 5, seed % 3, num_rows, impl)
        for mine, impl in zip(written, ("triton", "reference"), strict=True)
    )
    assert all(torch.equal(*pair) for pair in zip(*written, strict=True))
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True)), seed

for rows, count, size, rank, injects in (
    (1, 4, 40, 5, True),
    (18, 2, 21, 33, True),
    (67, 3, 24, 8, True),
    (3, 1, 70, 3, False),
):
    down, up = torch.randn(rank + count * injects, count * size) / 9, torch.randn(count * size, rank)
    x, scale, inject = torch.randn(rows, count, size), torch.randn(count, size), torch.randn(rows, count)
    out = among_nan(torch.randn(rows, size))
    for last in ((None, None), (inject, out)):
        mine, plain = x.clone(), x.clone()
        for pair in zip(
            hyper_mix(mine, scale, down, up, 1e-3, *last, impl="triton"),
            hyper_mix(plain, scale, down, up, 1e-3, *last, impl="reference"),
            strict=True,
        ):
            close(*pair)
        close(mine, plain)
    hyper_add(mine, inject, out, "triton")
    hyper_add(plain, inject, out, "reference")
    close(mine, plain)
    key, weights = torch.randn(rows, count, size), torch.randn(2, count, size)
    key[0] = 0
    for pair in zip(*(ple_gate(x, key, out, *weights, 1e-6, impl) for impl in ("triton", "reference")), strict=True):
        close(*pair)

for few in (0, 8):  # either tiles
    experts.FEW_EXPERT_ROWS = few
    for rows, size, number, inner, shared, top_k in (
        (1, 32, 8, 16, 32, 2),
        (37, 21, 5, 7, 40, 3),
        (70, 64, 3, 64, 64, 1),
    ):
        weights = [
            torch.randn(*shape) / shape[-1] ** 0.5
            for shape in (
                (number + 1, size),
                (number, 2 * inner, size),
                (number, size, inner),
                (2 * shared, size),
                (size, shared),
            )
        ]
        x = among_nan(torch.randn(rows, size))
        for renormalise in (True, False):
            residual = among_nan(torch.randn(rows, size)) if renormalise else None
            ours, theirs = (moe(x, *weights, top_k, renormalise, residual, impl) for impl in ("triton", "reference"))
            close(ours, theirs)
    weights[0][:] = 0  # equal scores
    close(*(moe(x, *weights, 2, True, impl=impl) for impl in ("triton", "reference")))
    broken = x.clone()
    broken[5] = float("nan")
    ours = moe(x, *weights, 2, True, impl="triton"), moe(broken, *weights, 2, True, impl="triton")
    assert ours[1][5].isnan().all()
    assert torch.equal(*(torch.cat([each[:5], each[6:]]) for each in ours))
