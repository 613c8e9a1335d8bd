"""Gated delta rule, one token at a time: the decode sequences of a step.

    S <- exp(g) S;  u = beta (v - S k);  S <- S + u k^T;  o = S q         per value head, S [V, K] in fp32

Each key head serves HV / H consecutive value heads. Decode sequences come first in a step and have one token each, so they
are the first tokens; the rows of other tokens are left as they are.

Shapes: q, k [T, H, K] (k normalised, q normalised and scaled), v [T, HV, V], g and beta [T, HV] fp32; state
[slots, HV, V, K] fp32, updated in place; kind and slot [N] int32; out [T, HV, V], written in place.
Source: Gated Delta Networks, https://arxiv.org/abs/2412.06464, eq. 10.
"""

from torch import Tensor

_DECODE = 0


def gated_delta_recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, kind: Tensor, slot: Tensor, out: Tensor
) -> None:
    """See the file's docstring."""
    _reference(q, k, v, g, beta, state, kind, slot, out)


def _reference(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, kind: Tensor, slot: Tensor, out: Tensor
) -> None:
    rows = int((kind == _DECODE).sum())
    if rows == 0:
        return
    heads, key_dim = k.shape[1:]
    value_heads, value_dim = v.shape[1:]
    dtype, slots = state.dtype, slot[:rows].long()
    grouped = (rows * heads, value_heads // heads * value_dim)  # the value heads of one key head share its k and q
    s = state[slots]
    s *= g[:rows].to(dtype).exp()[:, :, None, None]
    s = s.view(*grouped, key_dim)
    key = k[:rows].to(dtype).reshape(rows * heads, 1, key_dim)
    query = q[:rows].to(dtype).reshape(rows * heads, key_dim, 1)
    seen = (s @ key.transpose(1, 2)).view(rows, value_heads, value_dim)
    u = (v[:rows].to(dtype) - seen) * beta[:rows].to(dtype)[:, :, None]
    s.baddbmm_(u.view(*grouped, 1), key)
    out[:rows] = (s @ query).view(rows, value_heads, value_dim)
    state[slots] = s.view(rows, value_heads, value_dim, key_dim)
