"""Paged attention in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def _reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    row: Tensor,
    kind: Tensor,
    cu_tokens: Tensor,
    length: Tensor,
    sequence: Tensor,
    position: Tensor,
    scale: float,
    mixed: bool = True,
    max_draft: int = 0,
    selected: Tensor | None = None,
    block_size: int = 1,
    gate: Tensor | None = None,
) -> Tensor:
    out = q.new_zeros(q.shape)
    page_size = k_cache.shape[1]
    for batch, tokens in _batches(cu_tokens):
        longest = int(length[batch].max())
        pages = page_table[row[batch].long(), : -(-longest // page_size)].long()
        k = k_cache[pages].flatten(1, 2)[:, :longest]  # [b, L, Hkv, D]
        v = v_cache[pages].flatten(1, 2)[:, :longest]
        key_position = torch.arange(longest, device=q.device)
        query_position = position[tokens].long()  # [b, n]
        visible = key_position <= query_position[..., None]  # [b, n, L]
        if selected is not None:
            visible &= _in_blocks(selected[tokens], key_position, query_position, block_size)
        if len(pages) > 1:  # the shorter ones' pages hold other text, or poison, past their length
            past = (key_position >= length[batch].long()[:, None])[..., None, None]
            k, v = k.masked_fill(past, 0), v.masked_fill(past, 0)
        everything = len(pages) == 1 and tokens.shape[1] == 1 and selected is None
        attended = F.scaled_dot_product_attention(
            q[tokens].transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=None if everything else visible[:, None],
            scale=scale,
            enable_gqa=True,
        )
        out[tokens] = attended.transpose(1, 2)
    if gate is not None:
        num_tokens = int(cu_tokens[-1])
        out[:num_tokens] *= gate[:num_tokens].sigmoid()
    return out


def _in_blocks(selected: Tensor, key_position: Tensor, query_position: Tensor, block_size: int) -> Tensor:
    """Which keys a query may see by its selected blocks or as its tail. selected [b, n, B] -> bool [b, n, L]."""
    num_blocks = len(key_position) // block_size + 1
    chosen = selected.new_zeros(*selected.shape[:2], num_blocks + 1, dtype=torch.bool)
    chosen.scatter_(2, torch.where(selected < 0, num_blocks, selected).long(), True)
    in_tail = key_position >= ((query_position + 1) // block_size * block_size)[..., None]
    return chosen[..., key_position // block_size] | in_tail


def _batches(cu_tokens: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The step's sequences in batches of equal length: all of one token together, every other alone.

    Returns (sequence numbers [b], token numbers [b, n]) pairs, int64.
    """
    sizes = cu_tokens.diff()
    singles = (sizes == 1).nonzero().squeeze(1)
    batches = [(singles, cu_tokens[:-1].long()[singles][:, None])] if len(singles) else []
    for n in (sizes > 1).nonzero().squeeze(1):
        first, size = int(cu_tokens[n]), int(sizes[n])
        batches.append((n[None], torch.arange(first, first + size, device=cu_tokens.device)[None]))
    return batches
