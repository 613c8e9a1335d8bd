"""Products with packed weights: against float64, and a row's bits alone and in company."""

from types import SimpleNamespace

import pytest
import torch

from deltagram.kernels._few_rows import LEAST_ROOM, _constants, few_rows, tile_of
from deltagram.kernels._norm import Norm
from deltagram.kernels._packed import Packed
from deltagram.kernels.linear import linear, linear_onto
from deltagram.kernels.rms_norm import rms_norm
from deltagram.testing.compiled import LENGTHS, among_nan, assert_close, weight


@pytest.mark.parametrize("bf16", [True, False])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (16, 8), (49, 33), (200, 64)])
def test_any_number_of_rows(outputs: int, inputs: int, bf16: bool) -> None:
    torch.manual_seed(0)
    packed = weight(outputs, inputs, bf16=bf16)
    x = torch.randn(130, inputs)
    every = linear(x, packed)
    assert_close(every, x.double() @ packed.unpack().double().T)
    for rows in LENGTHS:
        assert torch.equal(linear(among_nan(x[-rows:]), packed), every[-rows:]), rows
    assert linear(x[:0], packed).shape == (0, outputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("is_packed", [True, False])
def test_onto_is_a_product_a_sum_and_a_norm(dtype: torch.dtype, is_packed: bool) -> None:
    torch.manual_seed(0)
    packed, norm = weight(49, 33), Norm(torch.rand(49) + 0.5, 1e-3)
    matrix = packed if is_packed else packed.unpack().to(dtype)
    for rows in (0, 1, 17, 130):
        x, residual = among_nan(torch.randn(rows, 33, dtype=dtype)), among_nan(torch.randn(rows, 49, dtype=dtype))
        for impl in (None, "reference"):
            y, normed = linear_onto(residual, x, matrix, norm, impl)
            expected = residual + linear(x, matrix, impl)
            assert torch.equal(y, expected), (rows, impl)
            body = "compiled" if impl is None and is_packed and dtype == torch.float32 else "reference"
            assert torch.equal(normed, rms_norm(expected, *norm, body)) and normed.dtype == dtype, (rows, impl)


def test_threads_do_not_change_bits() -> None:
    x, packed, before = torch.randn(200, 40), weight(50, 40), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(linear(x, packed))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_bf16_is_kept_only_where_it_is_exact() -> None:
    values = torch.randn(3, 20, 7)
    assert not Packed.of(values).brief and torch.equal(Packed.of(values).unpack(), values)
    rounded = values.bfloat16().float()
    assert Packed.of(rounded).brief and torch.equal(Packed.of(rounded).unpack(), rounded)


def test_other_dtypes_take_the_reference_and_the_compiled_body_refuses_them() -> None:
    x, packed = torch.randn(3, 8, dtype=torch.float64), weight(5, 8)
    assert linear(x, packed).dtype == torch.float64
    with pytest.raises(ValueError, match="float32"):
        linear(x, packed, impl="compiled")
    plain = torch.randn(5, 8)
    assert torch.equal(linear(x.float(), plain), torch.nn.functional.linear(x.float(), plain))


@pytest.mark.parametrize(("memory", "takes"), [(232_448, True), (166_912, True), (101_376, False)])
def test_products_of_few_rows_are_for_gpus_with_room(monkeypatch: pytest.MonkeyPatch, memory: int, takes: bool) -> None:
    """An H200, an A100, and cards for a desk."""
    properties = SimpleNamespace(shared_memory_per_block_optin=memory)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert few_rows(torch.zeros(4, 64, dtype=torch.bfloat16)) == takes


@pytest.mark.parametrize("gated", [True, False])
def test_the_least_room_holds_two_stages_of_every_tile(gated: bool) -> None:
    for outputs in (*range(16, 20_000, 112), 248_320):
        c = _constants(tile_of(outputs), 4096, 16, gated, LEAST_ROOM)
        lines = (c["BN"] + c["EX"]) * (2 if gated else 1) + c["BM"]  # type: ignore[operator]
        assert c["STAGES"] >= 2 and c["STAGES"] * lines * c["PARTS"] * c["PART"] * 2 <= LEAST_ROOM, outputs  # type: ignore[operator]
