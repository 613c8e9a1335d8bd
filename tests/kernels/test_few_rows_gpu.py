"""Products, gated MLPs and norms on a GPU: as exact as PyTorch's, the same bits in any company, captured or not."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from deltagram.kernels._gates import FEW_ROWS, ROWS_IN_PARTS, SOME_ROWS
from deltagram.kernels._norm import Norm
from deltagram.kernels._some_rows import some_rows
from deltagram.kernels.gated_mlp import gated_mlp, gated_mlp_onto
from deltagram.kernels.linear import linear, linear_onto
from deltagram.kernels.rms_norm import rms_norm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# outputs, inputs: tiles of each width, with extra outputs and without; sizes that fill none, one of them with a part
# of the inputs that holds none; the library's
SHAPES = (
    (12352, 2560), (5120, 1024), (2560, 4096), (1024, 2048), (2560, 9216), (8224, 1024), (333, 208), (2000, 1040),
    (40, 96), (50, 333),
)  # fmt: skip
ROWS = (1, 2, 8, 9, FEW_ROWS, FEW_ROWS + 1, 33, SOME_ROWS, ROWS_IN_PARTS, ROWS_IN_PARTS + 1, 200)


def random(*shape: int, std: float = 1.0) -> Tensor:
    return torch.randn(*shape, device="cuda").mul_(std).bfloat16()


def norm_of(size: int) -> Norm:
    return Norm(torch.rand(size, device="cuda") + 0.5, 1e-6)


def double(norm: Norm) -> Norm:
    return Norm(norm.weight.double(), norm.eps)


def assert_as_exact_as_plain(ours: Tensor, plain: Tensor, exact: Tensor) -> None:
    """At most twice the error of plain bf16 PyTorch against float64: over all, and of the worst row."""
    assert ours.dtype == plain.dtype and ours.shape == exact.shape and not ours.isnan().any()
    error, allowed = (ours.double() - exact).norm(dim=1), (plain.double() - exact).norm(dim=1)
    assert error.norm() <= 2 * allowed.norm() and error.max() <= 2 * allowed.max()


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_linear_is_as_exact_as_plain(outputs: int, inputs: int) -> None:
    torch.manual_seed(0)
    weight, norm = random(outputs, inputs, std=inputs**-0.5), norm_of(outputs)
    for rows in ROWS:
        x, residual = random(rows, inputs + 16)[:, :inputs], random(rows, outputs + 3)[:, 3:]
        if rows % 2:
            x = random(rows, inputs + 3)[:, 3:]
        exact = linear(x.double(), weight.double(), "reference")
        assert_as_exact_as_plain(linear(x, weight), linear(x, weight, "reference"), exact)
        both = linear_onto(residual.double(), x.double(), weight.double(), double(norm), "reference")
        plain = linear_onto(residual, x, weight, norm, "reference")
        for ours, theirs, true in zip(linear_onto(residual.clone(), x, weight, norm), plain, both, strict=True):
            assert_as_exact_as_plain(ours, theirs, true)


@pytest.mark.parametrize(("size", "inner"), [(2560, 9216), (1024, 3584), (96, 48), (208, 333), (333, 208)])
def test_gated_mlp_is_as_exact_as_plain(size: int, inner: int) -> None:
    torch.manual_seed(0)
    gate_up, down = random(2 * inner, size, std=size**-0.5), random(size, inner, std=inner**-0.5)
    wide, norm = (gate_up.double(), down.double()), norm_of(size)
    for rows in ROWS:
        x, residual = random(rows, size), random(rows, size)
        exact = gated_mlp(x.double(), *wide, "reference")
        assert_as_exact_as_plain(gated_mlp(x, gate_up, down), gated_mlp(x, gate_up, down, "reference"), exact)
        both = gated_mlp_onto(residual.double(), x.double(), *wide, double(norm), "reference")
        plain = gated_mlp_onto(residual, x, gate_up, down, norm, "reference")
        made = gated_mlp_onto(residual.clone(), x, gate_up, down, norm)
        for ours, theirs, true in zip(made, plain, both, strict=True):
            assert_as_exact_as_plain(ours, theirs, true)


@pytest.mark.parametrize(("outputs", "inputs"), [(2560, 9216), (2560, 4096), (1024, 2048), (40, 2048), (96, 208)])
def test_a_norm_on_the_way_is_the_norm_alone(outputs: int, inputs: int) -> None:
    """Bit for bit, wherever it is taken: with sums of parts, or after one sum."""
    torch.manual_seed(0)
    weight, norm = random(outputs, inputs, std=inputs**-0.5), norm_of(outputs)
    gate_up, down = random(2 * inputs, outputs, std=outputs**-0.5), random(outputs, inputs, std=inputs**-0.5)
    for rows in (1, FEW_ROWS, FEW_ROWS + 1, 48, SOME_ROWS, ROWS_IN_PARTS, ROWS_IN_PARTS + 1):
        x, residual = random(rows, inputs), random(rows, outputs)
        for y, normed in (
            linear_onto(residual.clone(), x, weight, norm),
            gated_mlp_onto(residual.clone(), rms_norm(residual, *norm), gate_up, down, norm),
        ):
            assert torch.equal(normed, rms_norm(y, *norm)), rows


def ops(outputs: int, inputs: int) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Of x [T, inputs] and a residual [T, outputs]; sums and their norms side by side."""
    weight, norm = random(outputs, inputs, std=inputs**-0.5), norm_of(outputs)
    gate_up, down = random(2 * inputs, inputs, std=inputs**-0.5), random(outputs, inputs, std=inputs**-0.5)
    found: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "linear": lambda x, residual: linear(x, weight),
        "linear_onto": lambda x, residual: torch.cat(linear_onto(residual.clone(), x, weight, norm), 1),
        "gated_mlp_onto": lambda x, residual: torch.cat(gated_mlp_onto(residual.clone(), x, gate_up, down, norm), 1),
    }
    return found


@pytest.mark.parametrize(("most", "fewer"), [(FEW_ROWS, (1, 2, 7, 8, 15)), (SOME_ROWS, (17, 33, 63))])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES[:-1])
def test_company_does_not_change_bits(outputs: int, inputs: int, most: int, fewer: tuple[int, ...]) -> None:
    """Within the rows of a kernel, whatever the other rows hold, and however many there are."""
    torch.manual_seed(0)
    x, residual = random(most, inputs), random(most, outputs)
    if most == SOME_ROWS and not some_rows(x):
        pytest.skip("is for compute capability 9.0")
    for name, op in ops(outputs, inputs).items():
        every = op(x, residual)
        for rows in fewer:
            assert torch.equal(op(x[:rows], residual[:rows]), every[:rows]), (name, rows)
            assert torch.equal(op(x[-rows:], residual[-rows:]), every[-rows:]), (name, rows)
        mixed = x.clone()
        mixed[1::2] = float("nan")
        out = op(mixed, residual)
        assert torch.equal(out[::2], every[::2]) and bool(out[1::2].isnan().all()), name


@pytest.mark.parametrize("rows", [33, SOME_ROWS])
def test_a_weight_of_many_tiles_is_multiplied_as_exactly(rows: int) -> None:
    """More tiles than there are programs: each takes one after the other."""
    torch.manual_seed(0)
    x, weight, residual = random(rows, 320), random(20_000, 320, std=0.05), random(rows, 20_000)
    exact, norm = F.linear(x.double(), weight.double()), norm_of(20_000)
    assert_as_exact_as_plain(linear(x, weight), linear(x, weight, "reference"), exact)
    y, _ = linear_onto(residual.clone(), x, weight, norm)
    plain, _ = linear_onto(residual, x, weight, norm, "reference")
    assert_as_exact_as_plain(y, plain, residual.double() + exact)


@pytest.mark.parametrize("rows", [5, 48])
def test_captured_is_eager_also_behind_work_of_another_stream(rows: int) -> None:
    """A chain of launches that overlap, one of them waiting for a slow neighbour."""
    torch.manual_seed(0)
    layers = [
        (random(2 * 3584, 1024, std=1 / 32), random(1024, 3584, std=1 / 60), random(1024, 1024, std=1 / 32))
        for _ in range(6)
    ]
    norm, slow, side = norm_of(1024), torch.randn(2048, 2048, device="cuda"), torch.cuda.Stream()
    x = random(rows, 1024)

    def run() -> Tensor:
        y = x * 1
        normed = rms_norm(y, *norm)
        for i, (gate_up, down, out) in enumerate(layers):
            y, normed = gated_mlp_onto(y, normed, gate_up, down, norm)
            if i % 2 == 0:
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    far = slow
                    for _ in range(3):
                        far = far @ slow / 50
                    bump = far[: len(x), :1024].bfloat16() + y
                torch.cuda.current_stream().wait_stream(side)
                y, normed = bump, rms_norm(bump, *norm)
            y, normed = linear_onto(y, normed, out, norm)
        return y + normed

    expected = run().clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(20):
        captured.fill_(float("nan"))
        graph.replay()
        assert torch.equal(captured, expected)
        assert torch.equal(run(), expected)


@pytest.mark.parametrize("shape", [(1, 2560), (300, 1024), (5, 4, 256), (3, 96), (2, 2, 40)])
def test_norm_is_as_exact_as_plain(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    wide = random(shape[0], *shape[1:-1], shape[-1] + 8)
    x = wide[..., : shape[-1]] if len(shape) == 2 else wide[..., : shape[-1]].contiguous()
    weight = torch.rand(shape[1:], device="cuda")
    exact = rms_norm(x.double(), weight.double(), 1e-5)
    plain = rms_norm(x, weight, 1e-5, impl="reference")
    ours = rms_norm(x, weight, 1e-5)
    assert_as_exact_as_plain(ours.flatten(1), plain.flatten(1), exact.flatten(1))
    padded = torch.cat((x, torch.full_like(x[:1], float("nan"))))
    assert torch.equal(rms_norm(padded, weight, 1e-5)[:-1], ours)


def test_float32_is_not_rounded() -> None:
    torch.manual_seed(0)
    x, weight, norm = torch.randn(3, 64, device="cuda"), torch.randn(32, 64, device="cuda"), norm_of(32)
    residual = torch.randn(3, 32, device="cuda")
    exact = linear_onto(residual.double(), x.double(), weight.double(), double(norm), "reference")
    for ours, true in zip(linear_onto(residual.clone(), x, weight, norm), exact, strict=True):
        assert (ours.double() - true).abs().max() < 1e-5 * true.abs().max()
