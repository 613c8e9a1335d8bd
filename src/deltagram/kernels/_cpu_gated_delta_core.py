"""Compiled body of gdn/core.py, for steps without drafts: what its ops do, for one key head of one sequence after the
other, so that nothing but projections, states and the gated output goes to memory.

Prefill goes as in _cpu_gated_delta_chunk.py and decode as in _cpu_gated_delta_recurrent.py: the same bits.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from deltagram.kernels._compiled import inlined
from deltagram.kernels._cpu_causal_conv1d import keep_inputs, list_inputs, mix_inputs, turn_taps
from deltagram.kernels._cpu_gated_delta_chunk import (
    FOUR,
    WORK,
    copy_row,
    dots,
    four_tokens,
    from_panels,
    no_token,
    to_panels,
)
from deltagram.kernels._cpu_gated_delta_prep import log_decay, strength, unit_row
from deltagram.kernels._cpu_gated_delta_recurrent import one_token
from deltagram.kernels._cpu_rms_norm_gated import gated_row
from deltagram.kernels._packed import room
from deltagram.kernels._products import PRODUCT, product
from deltagram.kernels._threads import spread, threaded
from deltagram.kernels._vectors import LANES, get, get_int, put, splat, store


@inlined
def _convolve(inputs, oldest, width, taps, step, q, k, v, key_dim, values, kq, row, four, to):  # type: ignore[no-untyped-def]
    """A token's q, k (of length 1, q / sqrt(K)) and v from its inputs; q, k, v: where the head's channels begin."""
    key, query = kq + 4 * row * key_dim, kq + 4 * (four + row) * key_dim
    mix_inputs(inputs, oldest, width, q, q + key_dim, taps, step, query)
    mix_inputs(inputs, oldest, width, k, k + key_dim, taps + 4 * key_dim, step, key)
    mix_inputs(inputs, oldest, width, v, v + values, taps + 8 * key_dim, step, to)
    unit_row(query, key_dim, np.float32(1) / np.sqrt(np.float32(key_dim)), query)
    unit_row(key, key_dim, np.float32(1), key)


@threaded
def _kernel(
    first: int, last: int, scratch: int, f: int, x: int, x_stride: int, a: int, a_stride: int, b: int, b_stride: int,
    weight: int, width: int, ring: int, length: int, A_log: int, dt_bias: int, heads: int, value_heads: int,
    key_dim: int, value_dim: int, wide: int, state: int, sequences: int, kind: int, cu_tokens: int, start: int,
    slot: int, z: int, z_stride: int, norm: int, eps: float, smooth: int, rows: int, out: int,
) -> None:  # fmt: skip
    group, keys = value_heads // heads, heads * key_dim
    values, channels = group * value_dim, 2 * keys + value_heads * value_dim
    step = 2 * key_dim + values
    inputs, taps = scratch, scratch + 8 * width
    kq = taps + 4 * width * step
    v = kq + 8 * FOUR * key_dim
    read = v + 4 * FOUR * values
    work = read + 8 * FOUR * group * wide
    decays = work + 4 * WORK
    betas = decays + 4 * FOUR * group
    states = betas + 4 * FOUR * group
    for unit in range(first, last):
        h, n = unit // sequences, unit % sequences
        q_at, k_at, v_at = h * key_dim, keys + h * key_dim, 2 * keys + h * values
        if unit == first or n == 0:
            turn_taps(weight, width, q_at, q_at + key_dim, taps, step)
            turn_taps(weight, width, k_at, k_at + key_dim, taps + 4 * key_dim, step)
            turn_taps(weight, width, v_at, v_at + values, taps + 8 * key_dim, step)
        what, begin, end, past = get_int(kind, n), get_int(cu_tokens, n), get_int(cu_tokens, n + 1), get_int(start, n)
        line = ring + 4 * get_int(slot, n) * length * channels
        held = state + 4 * (get_int(slot, n) * value_heads + h * group) * value_dim * key_dim
        each = value_dim * key_dim
        if what == 2:
            for j in range(group):
                to_panels(held + 4 * j * each, key_dim, value_dim, past == 0, states + 4 * j * wide * key_dim)
        for t in range(begin, end, FOUR if what == 2 else 1):
            some = min(FOUR, end - t) if what == 2 else 1
            for i in range(FOUR if what == 2 else 1):
                if i < some:
                    oldest = list_inputs(x, x_stride, t + i, begin, past, width, 1, line, length, channels, inputs)
                    _convolve(
                        inputs, oldest, width, taps, step, q_at, k_at, v_at, key_dim, values, kq, i, FOUR,
                        v + 4 * i * values,
                    )  # fmt: skip
                    for j in range(group):
                        hv, a_t, b_t = h * group + j, a + 4 * (t + i) * a_stride, b + 4 * (t + i) * b_stride
                        put(decays, FOUR * j + i, np.exp(log_decay(a_t, A_log, dt_bias, hv)))
                        put(betas, FOUR * j + i, strength(b_t, hv))
                else:
                    copy_row(v, values, v + 4 * i * values)
                    for j in range(group):
                        no_token(kq, key_dim, i, decays + 4 * FOUR * j, betas + 4 * FOUR * j)
            to = out + 4 * (t * value_heads + h * group) * value_dim
            if what == 2:
                dots(kq, key_dim, work)
                product(f, kq, key_dim, 2 * FOUR, key_dim, states, 0, group * wide, read, group * wide)
                for j in range(group):
                    four_tokens(
                        states + 4 * j * wide * key_dim, kq, key_dim, read + 4 * j * wide, group * wide,
                        v + 4 * j * value_dim, values, value_dim, decays + 4 * FOUR * j, betas + 4 * FOUR * j, work,
                        some, to + 4 * j * value_dim, value_heads * value_dim,
                    )  # fmt: skip
            else:
                for j in range(group):
                    s = held + 4 * j * each
                    one_token(
                        s, kq, v + 4 * j * value_dim, kq + 4 * FOUR * key_dim, key_dim, value_dim,
                        get(decays, FOUR * j), get(betas, FOUR * j), s, to + 4 * j * value_dim,
                    )  # fmt: skip
            for i in range(some if z != 0 else 0):
                for j in range(group):
                    at = to + 4 * (i * value_heads + j) * value_dim
                    gates = z + 4 * ((t + i) * z_stride + (h * group + j) * value_dim)
                    gated_row(at, gates, norm, value_dim, eps, smooth, at)
        if what == 2:
            for j in range(group):
                from_panels(states + 4 * j * wide * key_dim, key_dim, value_dim, held + 4 * j * each)
        keep_inputs(x, x_stride, begin, end, past, line, length, channels, q_at, q_at + key_dim)
        keep_inputs(x, x_stride, begin, end, past, line, length, channels, k_at, k_at + key_dim)
        keep_inputs(x, x_stride, begin, end, past, line, length, channels, v_at, v_at + values)
        if n == sequences - 1:  # padding
            for t in range(get_int(cu_tokens, sequences), rows):
                for i in range(0, values, LANES):
                    store(out + 4 * (t * value_heads * value_dim + h * values), i, values, splat(0.0))


def gated_delta_core(
    qkv: Tensor, a: Tensor, b: Tensor, conv_weight: Tensor, A_log: Tensor, dt_bias: Tensor, heads: int, key_dim: int,
    ring: Tensor, state: Tensor, kind: Tensor, cu_tokens: Tensor, start: Tensor, slot: Tensor, z: Tensor | None,
    norm: Tensor | None, eps: float, smooth: bool,
) -> Tensor:  # fmt: skip
    rows, width = len(qkv), conv_weight.shape[1]
    value_heads, value_dim = state.shape[1:3]
    assert qkv.stride(1) == 1 and a.stride(1) == 1 and b.stride(1) == 1
    assert conv_weight.is_contiguous() and ring.is_contiguous() and state.is_contiguous()
    assert z is None or z.stride()[1:] == (value_dim, 1)
    out = torch.empty(rows, value_heads, value_dim)
    gating = (0, 0, 0) if z is None or norm is None else (z.data_ptr(), z.stride(0), norm.data_ptr())
    group = value_heads // heads
    values, wide, units = group * value_dim, group * room(value_dim), heads * len(kind)
    scratch = 2 * width + width * (2 * key_dim + values) + 2 * FOUR * key_dim + FOUR * values + 2 * FOUR * wide + WORK
    spread(
        _kernel, units, 1 if rows >= 64 else units, scratch + 2 * FOUR * group + key_dim * wide, PRODUCT,
        qkv.data_ptr(), qkv.stride(0), a.data_ptr(), a.stride(0), b.data_ptr(), b.stride(0), conv_weight.data_ptr(),
        width, ring.data_ptr(), ring.shape[1], A_log.data_ptr(), dt_bias.data_ptr(), heads, value_heads, key_dim,
        value_dim, room(value_dim), state.data_ptr(), len(kind), kind.data_ptr(), cu_tokens.data_ptr(),
        start.data_ptr(), slot.data_ptr(), *gating, eps, smooth, rows, out.data_ptr(),
    )  # fmt: skip
    return out
