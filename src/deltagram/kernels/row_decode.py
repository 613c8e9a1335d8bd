"""Rows of a memory table by their ids, as the numbers they mean.

    out[i, d] = value[ids[i], d] * scale;  zeros where ids[i] is -1

Values are bf16, fp16, fp32 or fp8 e4m3. Scales: one ue8m0 byte for each `group` values of an fp8 row, after its
values (byte s is 2^(s - 127), so 0 is 2^-127, and 255 is NaN: the OCP microscaling definition), or one fp32 number
for the table. The product is rounded to fp32 once, then to `dtype`: the same bits here, in the kernel and from every
placement. The kernel reads fp8 as bytes, which GPUs without fp8 can too, and a table in page-locked host memory in
place.

Shapes: table uint8 [rows, row_bytes], a row being dim values, then dim / group scale bytes; ids int32 or int64 [...],
each -1 or in [0, rows); scale fp32 [1]; out [..., dim] of `dtype` (bf16, fp16, fp32; the reference takes float64
too), contiguous.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltagram.kernels._triton import Build, Impl, choose, jit, on_cpu, power_of_two, tl

_ELEMENTS, _WARPS = 2048, 4  # a program's


def row_decode(
    table: Tensor,
    ids: Tensor,
    values: torch.dtype,
    dim: int,
    dtype: torch.dtype,
    group: int = 0,
    scale: Tensor | None = None,
    out: Tensor | None = None,
    impl: Impl = None,
) -> Tensor:
    """See the file's docstring. `group` 0: no scale bytes."""
    plain = not group and scale is None and dtype == torch.float32 and values in (torch.float32, torch.bfloat16)
    body = choose(impl, ids, _reference, _launch, _compiled if plain else None)
    return body(table, ids, values, dim, dtype, group, scale, out)


def _reference(
    table: Tensor,
    ids: Tensor,
    values: torch.dtype,
    dim: int,
    dtype: torch.dtype,
    group: int = 0,
    scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    if out is None:
        out = torch.empty(*ids.shape, dim, dtype=dtype, device=ids.device)
    flat, rows = ids.reshape(-1), out.view(-1, dim)
    some_absent = flat.numel() > 0 and int(flat.min()) < 0
    wanted = flat.clamp(min=0) if some_absent else flat
    if values == dtype and group == 0 and scale is None:
        torch.index_select(table.view(values), 0, wanted, out=rows)
    else:
        packed = table.index_select(0, wanted)
        found = packed[:, : dim * values.itemsize].view(values).float()
        if group:
            exponents = packed[:, dim:].int()
            bits = torch.where(exponents == 0, 1 << 22, exponents << 23)
            scales = torch.where(exponents == 255, torch.nan, bits.view(torch.float32))
            found = (found.unflatten(1, (-1, group)) * scales[..., None]).flatten(1)
        if scale is not None:
            found = found * scale
        rows.copy_(found)
    if some_absent:
        rows[flat < 0] = 0
    return out


_compiled = on_cpu("row_decode")


@jit
def e4m3(byte):  # type: ignore[no-untyped-def]
    """fp8 e4m3 bytes to fp32: exponent and mantissa moved to fp32's places, and the product with 2^120 for the bias. It
    is exact for the small numbers too, whose bits are a small number of fp32."""
    number = ((byte & 127) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
    number = tl.where((byte & 127) == 127, float("nan"), number)
    signed = number.to(tl.int32, bitcast=True) | ((byte & 128) << 24)  # Triton's -x is 0 - x, which loses -0
    return signed.to(tl.float32, bitcast=True)


@jit
def ue8m0(byte):  # type: ignore[no-untyped-def]
    """Scale bytes to fp32."""
    power = tl.where(byte == 0, 1 << 22, byte << 23).to(tl.float32, bitcast=True)
    return tl.where(byte == 255, float("nan"), power)


@jit(do_not_specialize=["num_rows"])
def _kernel(  # type: ignore[no-untyped-def]
    table,  # of the values' type, fp8 as bytes
    table_bytes,
    ids,
    scale,
    out,
    num_rows,
    DIM: tl.constexpr,
    ROW: tl.constexpr,  # elements of `table` a row
    WIDTH: tl.constexpr,  # values that share a scale byte; DIM where none do
    FP8: tl.constexpr,
    HAS_GROUPS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    flat_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    flat_wanted = tl.load(ids + flat_row, mask=flat_row < num_rows, other=-1).to(tl.int64)
    row, wanted = flat_row[:, None, None], flat_wanted[:, None, None]
    inside = row < num_rows
    group = tl.arange(0, GROUPS)[None, :, None]
    within = tl.arange(0, BLOCK)[None, None, :]
    d = group * WIDTH + within
    known = (group < DIM // WIDTH) & (within < WIDTH)
    present = (wanted >= 0) & known
    value = tl.load(table + wanted * ROW + d, mask=present, other=0)
    if FP8:
        value = e4m3(value.to(tl.int32))
    else:
        value = value.to(tl.float32)
    if HAS_GROUPS:
        scaled = (wanted >= 0) & (group < DIM // WIDTH)
        value = value * ue8m0(tl.load(table_bytes + wanted * ROW + DIM + group, mask=scaled, other=127).to(tl.int32))
    if HAS_SCALE:
        value = value * tl.load(scale)
        value = tl.where(wanted >= 0, value, 0.0)  # an infinite scale would make NaN of the zeros
    tl.store(out + row * DIM + d, value.to(out.dtype.element_ty), mask=inside & known)


def _launch(
    table: Tensor,
    ids: Tensor,
    values: torch.dtype,
    dim: int,
    dtype: torch.dtype,
    group: int = 0,
    scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    if out is None:
        out = torch.empty(*ids.shape, dim, dtype=dtype, device=ids.device)
    assert table.is_contiguous() and ids.is_contiguous() and out.is_contiguous() and out.dtype == dtype
    count = ids.numel()
    if count:
        element = torch.uint8 if values.itemsize == 1 else values
        row = table.shape[1] // element.itemsize
        constants = _constants(dim, row, group, values.itemsize == 1, scale is not None)
        grid = (-(-count // constants["ROWS"]),)
        _kernel[grid](table.view(element), table, ids, scale, out, count, **constants, num_warps=_WARPS)
    return out


def _constants(dim: int, row: int, group: int, fp8: bool, has_scale: bool) -> dict[str, int]:
    width = group or dim
    groups, block = power_of_two(dim // width), power_of_two(width)
    tile = {"ROWS": max(1, _ELEMENTS // (groups * block)), "GROUPS": groups, "BLOCK": block}
    switches = {"FP8": fp8, "HAS_GROUPS": group > 0, "HAS_SCALE": has_scale}
    return {"DIM": dim, "ROW": row, "WIDTH": width} | switches | tile


def ahead_of_time() -> list[Build]:
    builds = []
    forms = (("*u8", 256, 264, 32, True, False), ("*u8", 160, 160, 0, True, True), ("*bf16", 160, 160, 0, False, False))
    for values, dim, row, group, fp8, has_scale in forms:
        types = {"table": values, "table_bytes": "*u8", "ids": "*i64", "scale": "*fp32", "out": "*bf16"}
        constants: dict[str, object] = dict(_constants(dim, row, group, fp8, has_scale))
        constants |= {} if has_scale else {"scale": None}
        builds.append(Build(_kernel, types | {"num_rows": "i32"}, constants))
    return builds
