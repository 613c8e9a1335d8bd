"""Gated delta rule over the prefill sequences of a step, 64 tokens at a time.

The recurrence of gated_delta_recurrent, in its chunked (WY) form. With G the running sum of g inside a chunk and
D[i, j] = exp(G_i - G_j) for i >= j, the corrections U of a chunk that starts from state S solve

    (I + strictly_lower(beta_i D_ij k_i . k_j)) U = beta V - (beta exp(G) K) S^T
    O = exp(G) (Q S^T) + lower(D_ij q_i . k_j) U
    S <- exp(G_last) S + U^T (exp(G_last - G) K)

A sequence whose request has computed nothing before starts from zero, whatever its slot holds; any other starts from its
slot. The final state is written back to the slot. Rows of tokens that are not prefill are left as they are.

Shapes: q, k [T, H, K] (k normalised, q normalised and scaled), v [T, HV, V], g and beta [T, HV] fp32; state
[slots, HV, V, K] fp32, updated in place; chunks [NT, 2] (sequence, index; sequence -1 is padding, ordered by sequence),
cu_tokens [N + 1], start [N], slot [N]: int32; out [T, HV, V], written in place.
Source: Parallelizing Linear Transformers with the Delta Rule, https://arxiv.org/abs/2406.06484, with the gate of
https://arxiv.org/abs/2412.06464.
"""

import torch
from torch import Tensor

CHUNK = 64


def gated_delta_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    chunks: Tensor,
    cu_tokens: Tensor,
    start: Tensor,
    slot: Tensor,
    out: Tensor,
) -> None:
    """See the file's docstring."""
    _reference(q, k, v, g, beta, state, chunks, cu_tokens, start, slot, out)


def _reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    chunks: Tensor,
    cu_tokens: Tensor,
    start: Tensor,
    slot: Tensor,
    out: Tensor,
) -> None:
    chunks = chunks[chunks[:, 0] >= 0].long()
    if len(chunks) == 0:
        return
    dtype, group = state.dtype, v.shape[1] // k.shape[1]
    sequence, order = chunks.unbind(1)
    token = cu_tokens.long()[sequence][:, None] + order[:, None] * CHUNK + torch.arange(CHUNK, device=q.device)  # [C, 64]
    valid = token < cu_tokens.long()[sequence + 1][:, None]
    token = torch.where(valid, token, 0)

    def chunked(x: Tensor) -> Tensor:  # [T, heads, ...] -> [C, heads, 64, ...], zero past the sequence's end
        rows = x[token].to(dtype)
        return rows.masked_fill_(~valid.view(*valid.shape, *[1] * (x.dim() - 1)), 0).transpose(1, 2)

    q_c, k_c, v_c, g_c, beta_c = (chunked(x) for x in (q, k, v, g, beta))
    decay_log = g_c.cumsum(-1)  # [C, HV, 64]
    decay = (decay_log[..., :, None] - decay_log[..., None, :]).tril_().exp_().tril_()  # upper part: exp(0), then cut
    key_products = (k_c @ k_c.transpose(-1, -2)).repeat_interleave(group, 1)
    query_products = (q_c @ k_c.transpose(-1, -2)).repeat_interleave(group, 1).mul_(decay)
    q_c, k_c = q_c.repeat_interleave(group, 1), k_c.repeat_interleave(group, 1)
    from_start = decay_log.exp().unsqueeze(-1)
    system = key_products.mul_(decay).mul_(beta_c.unsqueeze(-1))  # unit lower triangular: the diagonal is not read
    right = torch.cat((v_c * beta_c.unsqueeze(-1), k_c * (beta_c.unsqueeze(-1) * from_start)), -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    new_value, state_key = solved.split((v.shape[2], k.shape[2]), -1)
    q_c = q_c * from_start
    to_end = k_c * (decay_log[..., -1:] - decay_log).exp_().unsqueeze(-1)
    whole = from_start[..., -1:, :]  # [C, HV, 1, 1]

    slots = slot.long()[sequence]
    first = (start.long()[sequence] == 0) & (order == 0)
    for step in range(int(order.max()) + 1):
        c = (order == step).nonzero().squeeze(1)
        s = state[slots[c]].masked_fill_(first[c].view(-1, 1, 1, 1), 0)  # [P, HV, V, K]
        u = new_value[c] - state_key[c] @ s.transpose(-1, -2)
        o = q_c[c] @ s.transpose(-1, -2) + query_products[c] @ u
        state[slots[c]] = s * whole[c] + u.transpose(-1, -2) @ to_end[c]
        out[token[c][valid[c]]] = o.transpose(1, 2)[valid[c]].to(out.dtype)
