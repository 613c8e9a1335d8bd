"""row_decode: every fp8 byte under every scale byte, against float64 arithmetic on the definition, bit by bit."""

import math

import pytest
import torch

from deltagram.kernels.row_decode import row_decode

FP8 = torch.float8_e4m3fn
DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]


def e4m3(byte: int) -> float:
    sign, exponent, mantissa = -1.0 if byte & 128 else 1.0, byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def bits(x: torch.Tensor) -> torch.Tensor:
    integer = {2: torch.int16, 4: torch.int32}[x.element_size()]
    return x.masked_fill(x.isnan(), 0).view(integer)


def assert_same(a: torch.Tensor, b: torch.Tensor) -> None:
    assert torch.equal(a.isnan(), b.isnan()) and torch.equal(bits(a), bits(b))


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_value_under_every_scale(device, dtype):
    table = torch.empty(256, 264, dtype=torch.uint8)
    table[:, :256] = torch.arange(256)
    table[:, 256:] = torch.arange(256)[:, None]
    values = torch.tensor([e4m3(byte) for byte in range(256)], dtype=torch.float64)
    scales = torch.tensor([2.0 ** (byte - 127) for byte in range(255)] + [math.nan], dtype=torch.float64)
    want = (scales[:, None] * values).float().to(dtype)  # the product is exact in float64
    got = row_decode(table.to(device), torch.arange(256, device=device), FP8, 256, dtype, 32).cpu()
    assert_same(got, want)
    if dtype == torch.float32:
        one = 0x38
        assert got[0, one] == 2.0**-127 and got[0, one | 128] == -(2.0**-127)  # not 0, as some engines have it
        assert got[255].isnan().all()
        assert torch.signbit(got[1, 128])  # minus zero stays


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("values", [torch.float32, torch.bfloat16, torch.float16, FP8], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [160, 24, 1])
def test_formats(device, values, dtype, dim):
    generator = torch.Generator().manual_seed(dim)
    numbers = torch.randn(50, dim, generator=generator).to(values)
    table = numbers.view(torch.uint8).view(50, -1)
    ids = torch.randint(-1, 50, (33, 3), generator=generator)
    scale = torch.tensor([0.37]) if values == FP8 else None
    want = numbers.float() * scale if values == FP8 else numbers.float()
    want = want.to(dtype)[ids.clamp(min=0)].masked_fill((ids < 0)[..., None], 0)
    on_device = None if scale is None else scale.to(device)
    out = torch.full((33, 3, dim), torch.nan, dtype=dtype, device=device)
    arguments = table.to(device), ids.to(device), values, dim, dtype, 0, on_device
    assert_same(row_decode(*arguments, out).cpu(), want)
    assert_same(row_decode(*arguments).cpu(), want)
    assert_same(row_decode(*arguments[:1], ids.int().to(device), *arguments[2:]).cpu(), want)
    assert row_decode(table.to(device), ids[:0].to(device), *arguments[2:]).shape == (0, 3, dim)


def test_groups_of_scales_and_float64():
    table = torch.zeros(1, 66, dtype=torch.uint8)
    table[0, :64] = 0x38
    table[0, 64:] = torch.tensor([127, 130])
    got = row_decode(table, torch.tensor([0]), FP8, 64, torch.float64, 32)
    assert got.dtype == torch.float64 and got[0].tolist() == [1.0] * 32 + [8.0] * 32


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_an_absent_row_is_zero_under_any_scale(device):
    table = torch.full((1, 4), 0x38, dtype=torch.uint8, device=device)
    scale = torch.tensor([math.inf], device=device)
    got = row_decode(table, torch.tensor([-1, 0], device=device), FP8, 4, torch.float32, 0, scale)
    assert got[0].tolist() == [0.0] * 4 and got[1].isinf().all()
