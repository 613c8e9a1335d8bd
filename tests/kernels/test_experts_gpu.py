"""moe, hyper_mix, hyper_add and ple_gate on a GPU: their error beside plain arithmetic's, a row's bits in any company,
and the bits of a replayed graph."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deltagram.kernels.hyper_add import hyper_add
from deltagram.kernels.hyper_mix import hyper_mix
from deltagram.kernels.moe import moe
from deltagram.kernels.ple_gate import ple_gate
from deltagram.testing.compiled import among_nan

CUDA = torch.device("cuda")
DTYPES = [torch.bfloat16, torch.float32]
EXPERTS = {"round": (256, 32, 4, 128, 64), "odd": (100, 8, 2, 37, 90)}  # hidden, experts, top_k, inner, shared
STREAMS = {"round": (4, 2560, 320), "odd": (3, 100, 21)}  # streams, hidden, rank


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton (no GPU)")
def test_kernels_read_what_they_should() -> None:
    script = Path(__file__).parent / "interpreted_experts.py"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * scale).to(dtype).to(CUDA)


def expert_weights(shape: str, dtype: torch.dtype) -> list[Tensor]:
    size, experts, _, inner, shared = EXPERTS[shape]
    torch.manual_seed(0)
    sizes = (experts + 1, size), (experts, 2 * inner, size), (experts, size, inner), (2 * shared, size), (size, shared)
    return [random(*each, dtype=dtype, scale=each[-1] ** -0.5) for each in sizes]


def mix_weights(shape: str, dtype: torch.dtype, injects: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    count, size, rank = STREAMS[shape]
    torch.manual_seed(0)
    scale = 1 + random(count, size, dtype=torch.float32, scale=0.1)
    down = random(rank + count * injects, count * size, dtype=dtype, scale=(count * size) ** -0.5)
    return scale, down, random(count * size, rank, dtype=dtype, scale=2 * rank**-0.5)


def compare(ours: Tensor, plain: Tensor, exact: Tensor) -> None:
    """The error of `ours` is at most twice that of `plain`, on average and in the worst row."""
    assert ours.dtype == plain.dtype and ours.shape == plain.shape
    error, allowed = ((each.double().cpu() - exact).abs() for each in (ours, plain))
    floor = 1e-6 * exact.abs().mean() if ours.dtype == torch.float32 else 0
    assert error.mean() <= 2 * allowed.mean() + floor
    assert error.flatten(1).mean(1).max() <= 2 * allowed.flatten(1).mean(1).max() + floor


def double(*tensors: Tensor) -> list[Tensor]:
    return [each.double().cpu() for each in tensors]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", EXPERTS)
@pytest.mark.parametrize("rows", [1, 8, 50, 300])
@pytest.mark.parametrize("renormalise", [True, False])
def test_error_of_experts(rows: int, shape: str, dtype: torch.dtype, renormalise: bool) -> None:
    weights, top_k = expert_weights(shape, dtype), EXPERTS[shape][2]
    x = among_nan(random(rows, EXPERTS[shape][0], dtype=dtype))
    exact_x, *exact = double(x, *weights)
    best = (exact_x @ exact[0][:-1].T).topk(top_k + 1).values
    clear = best[:, -2] - best[:, -1] > 0.03  # which experts are best does not hang on rounding
    residual = among_nan(random(rows, EXPERTS[shape][0], dtype=dtype)) if renormalise else None
    results = [moe(x, *weights, top_k, renormalise, residual, impl)[clear.cuda()] for impl in ("triton", "reference")]
    if clear.any():
        added = None if residual is None else residual.double().cpu()
        compare(*results, moe(exact_x, *exact, top_k, renormalise, added)[clear])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", STREAMS)
@pytest.mark.parametrize("rows", [1, 17, 64, 65, 200])
def test_error_of_mixing(rows: int, shape: str, dtype: torch.dtype) -> None:
    count, size, _ = STREAMS[shape]
    for injects in (True, False):
        weights = mix_weights(shape, dtype, injects)
        x, inject = random(rows, count, size, dtype=dtype), random(rows, count, dtype=dtype)
        out = among_nan(random(rows, size, dtype=dtype))
        last = () if not injects else (inject, out)
        streams = [x.clone(), x.clone(), x.double().cpu()]
        results = [
            (*hyper_mix(streams[i], *weights, 1e-6, *last, impl=impl), streams[i])  # type: ignore[arg-type]
            for i, impl in enumerate(("triton", "reference"))
        ]
        exact = hyper_mix(streams[2], *double(*weights), 1e-6, *double(*last))  # type: ignore[arg-type]
        for ours, plain, expected in zip(*results, (*exact, streams[2]), strict=True):
            if expected.numel():
                compare(ours, plain, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", STREAMS)
def test_error_of_the_memory_gate_and_of_adding(shape: str, dtype: torch.dtype) -> None:
    count, size, _ = STREAMS[shape]
    torch.manual_seed(0)
    x, key, value = (random(33, *each, dtype=dtype) for each in ((count, size), (count, size), (size,)))
    key[3] = 0
    value, inject = among_nan(value), random(33, count, dtype=dtype)
    norms = [1 + random(count, size, dtype=torch.float32, scale=0.1) for _ in range(2)]
    results = [ple_gate(x, key, value, *norms, 1e-6, impl) for impl in ("triton", "reference")]
    for ours, plain, expected in zip(*results, ple_gate(*double(x, key, value, *norms), 1e-6), strict=True):
        compare(ours, plain, expected)
    streams = [x.clone(), x.clone(), x.double().cpu()]
    hyper_add(streams[0], inject, value)
    hyper_add(streams[1], inject, value, "reference")
    hyper_add(streams[2], *double(inject, value))
    compare(*streams)


Case = tuple[Callable[..., Any], list[Tensor]]  # an op of tensors with a row a token, and such tensors


def cases(rows: int, dtype: torch.dtype) -> dict[str, Case]:
    count, size, _ = STREAMS["round"]
    experts, mix = expert_weights("round", dtype), mix_weights("round", dtype)
    torch.manual_seed(rows)
    x, inject, out = (random(rows, *each, dtype=dtype) for each in ((count, size), (count,), (size,)))
    norms = [1 + random(count, size, dtype=torch.float32, scale=0.1) for _ in range(2)]

    def mixing(x: Tensor, inject: Tensor, out: Tensor) -> tuple[Tensor, ...]:
        streams = x.clone()
        return (*hyper_mix(streams, *mix, 1e-6, inject, out), streams)

    def adding(x: Tensor, inject: Tensor, out: Tensor) -> tuple[Tensor, ...]:
        streams = x.clone()
        hyper_add(streams, inject, out)
        return (streams,)

    return {
        "moe": (lambda x: (moe(x, *experts, 4, True),), [random(rows, 256, dtype=dtype)]),
        "hyper_mix": (mixing, [x, inject, out]),
        "hyper_add": (adding, [x, inject, out]),
        "ple_gate": (lambda x, key, value: ple_gate(x, key, value, *norms, 1e-6), [x, x.flip(0), out]),
    }


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", ["moe", "hyper_mix", "hyper_add", "ple_gate"])
def test_a_row_has_the_same_bits_in_any_company(op: str, dtype: torch.dtype) -> None:
    """Alone, among others, with rows of NaN around it; also in a larger bucket of the same tiles."""
    run, tensors = cases(50, dtype)[op]
    together = run(*tensors)
    for row in (0, 13, 49):
        alone = run(*(each[row : row + 1].contiguous() for each in tensors))
        assert all(torch.equal(a, b[row : row + 1]) for a, b in zip(alone, together, strict=True))
    run, tensors = cases(300, dtype)[op]
    together = run(*tensors)
    broken = [each.clone() for each in tensors]
    for each in broken:
        each[100:] = float("nan")
    for others in (run(*broken), run(*(each[:250] for each in tensors))) if op == "moe" else (run(*broken),):
        assert all(torch.equal(a[:100], b[:100]) for a, b in zip(others, together, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 20, 300])
@pytest.mark.parametrize("op", ["moe", "hyper_mix", "hyper_add", "ple_gate"])
def test_a_replayed_graph_gives_the_bits_of_eager_calls(op: str, rows: int, dtype: torch.dtype) -> None:
    run, tensors = cases(rows, dtype)[op]
    run(*tensors)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(*tensors)
    for seed in range(4):
        torch.manual_seed(seed)
        for each in tensors:
            each.copy_(torch.randn_like(each))
        if seed == 3:  # padding may hold anything
            for each in tensors:
                each[rows // 2 + 1 :] = float("nan")
        graph.replay()
        for ours, theirs in zip(captured, run(*tensors), strict=True):
            assert torch.equal(ours[: rows // 2 + 1], theirs[: rows // 2 + 1])
