"""Depthwise causal convolution over the sequences of a step, with silu, continued from each request's ring of past inputs.

    y[t, c] = silu(sum over j < W of weight[c, j] * x[position(t) - (W - 1 - j) * dilation, c])

Inputs before position 0 count as zero. Inputs of this step are read from `x`; older ones from the request's ring, where the
input of absolute position p lives at p modulo R. The step's inputs are then written to the ring (the last R of a sequence).
Since every position of a request passes through here in order, an entry read is always one the same request wrote: a
recycled slot needs no clearing, and rejected drafts are overwritten by the tokens that replace them.

Shapes: x [T, C] (rows may be strided), weight [C, W], ring [slots, R, C] with R >= (W - 1) * dilation plus the drafts of a
step; cu_tokens [N + 1], sequence [T], position [T], start [N], slot [N]: int32, as in the sequence table. Returns [T, C] in
x's dtype, zero for padding; arithmetic in fp32 (float64 for float64 inputs). `ring` is updated in place.
Errors: ValueError for a ring too short for the kernel's reach.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    ring: Tensor,
    cu_tokens: Tensor,
    sequence: Tensor,
    position: Tensor,
    start: Tensor,
    slot: Tensor,
    dilation: int = 1,
) -> Tensor:
    """See the file's docstring."""
    reach = (weight.shape[1] - 1) * dilation
    if ring.shape[1] < reach:
        raise ValueError(f"a ring of {ring.shape[1]} entries is too short for a kernel that reaches back {reach}")
    return _reference(x, weight, ring, cu_tokens, sequence, position, start, slot, dilation)


def _reference(
    x: Tensor,
    weight: Tensor,
    ring: Tensor,
    cu_tokens: Tensor,
    sequence: Tensor,
    position: Tensor,
    start: Tensor,
    slot: Tensor,
    dilation: int = 1,
) -> Tensor:
    num_tokens = int(cu_tokens[-1])
    width, length = weight.shape[1], ring.shape[1]
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    out = x.new_zeros(x.shape)
    if num_tokens == 0:
        return out
    new = x[:num_tokens]
    seq, pos = sequence[:num_tokens].long(), position[:num_tokens].long()
    token_slot, begin = slot.long()[seq], start.long()[seq]
    taps = weight.to(dtype)
    total = new.to(dtype) * taps[:, -1]
    index = torch.arange(num_tokens, device=x.device)
    only_old = bool((cu_tokens.diff() <= 1).all())  # one token a sequence: every earlier tap is in the ring
    for lag in range(dilation, width * dilation, dilation):
        source = pos - lag
        old = ring[token_slot, source.remainder(length)].to(dtype)
        if not only_old:
            old = torch.where((source >= begin)[:, None], new[(index - lag).clamp_(min=0)].to(dtype), old)
        old.masked_fill_((source < 0)[:, None], 0)
        total.addcmul_(old, taps[:, width - 1 - lag // dilation])
    kept = pos >= (begin + cu_tokens.diff().long()[seq] - length)
    if not only_old and not bool(kept.all()):
        new, token_slot, pos = new[kept], token_slot[kept], pos[kept]
    ring[token_slot, pos.remainder(length)] = new.to(ring.dtype)
    out[:num_tokens] = F.silu(total)
    return out
