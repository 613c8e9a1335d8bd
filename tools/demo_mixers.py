"""Gated DeltaNet and indexed attention of the demo model, over whole sequences, in plain PyTorch.

Shapes: B sequences, T tokens, H hidden, N heads, C chunks, K and V key and value sizes of a head. The delta rule
runs in float32 whatever the autocast.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from demo_config import DemoConfig
from demo_layers import OffsetNorm, depthwise_conv, linear
from torch import Tensor, nn

CHUNK = 64
INDEXER_QUERY_STRIDE = 8  # the indexer's loss looks at every 8th query


class UnitLowerInverse(torch.autograd.Function):
    """(I + A)^-1 for strictly lower triangular A [..., n, n], n a power of two.

    By halves: the inverse of [[P, 0], [A, Q]] is [[P', 0], [-Q' A P', Q']], so that blocks of 2 m rows follow from
    those of m. Batched products alone, which a graph can capture. On an H200, 4096 systems of 64 rows take
    1.9 ms so and 1.0 ms by torch.linalg.solve_triangular, of which nobody has tried whether it can be captured.
    """

    @staticmethod
    def forward(ctx: Any, lower: Tensor) -> Tensor:
        row = torch.arange(lower.shape[-1], device=lower.device)
        inverse = torch.eye(len(row), dtype=lower.dtype, device=lower.device).expand_as(lower)
        size = 1
        while size < len(row):
            block = row // size
            joins = (block.unsqueeze(-1) % 2 == 1) & (block.unsqueeze(-1) - block == 1)
            inverse = inverse - inverse @ (lower * joins) @ inverse
            size *= 2
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        return -(inverse.mT @ grad @ inverse.mT).tril(-1)


def chunked_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule from a zero state, in chunks of 64 tokens.

    S <- exp(g) S; u = beta (v - S^T k); S <- S + k u^T; o = S^T q, with S [K, V]. Inside a chunk the u of all tokens
    solve one unit lower triangular system; between chunks the state moves by S <- A S + B, so that only this product
    is sequential. q, k [B, N, T, K] (normalised, q scaled), v [B, N, T, V], g, beta [B, N, T], float32 -> [B, N, T, V].
    """
    length = q.shape[2]
    pad = -length % CHUNK
    q, k, v = (F.pad(x, (0, 0, 0, pad)).unflatten(2, (-1, CHUNK)) for x in (q, k, v))
    g, beta = (F.pad(x, (0, pad)).unflatten(2, (-1, CHUNK)) for x in (g, beta))
    decay = g.cumsum(-1)  # log of the decay since the chunk's start, [B, N, C, 64]
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    between = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(~lower, -torch.inf).exp()
    scaled_k = k * beta.unsqueeze(-1)
    system = (scaled_k @ k.mT * between).tril(-1)  # its unit diagonal is implied
    right = torch.cat([v * beta.unsqueeze(-1), scaled_k * decay.exp().unsqueeze(-1)], -1)
    inverse = UnitLowerInverse.apply(system)
    solved = inverse @ right
    own, from_state = solved.split([v.shape[-1], k.shape[-1]], -1)  # u = own - from_state S
    to_end = k * (decay[..., -1:] - decay).exp().unsqueeze(-1)
    identity = torch.eye(k.shape[-1], device=q.device)
    move = decay[..., -1, None, None].exp() * identity - to_end.mT @ from_state  # A [B, N, C, K, K]
    add = to_end.mT @ own  # B [B, N, C, K, V]
    state = torch.zeros_like(add[:, :, 0])
    states = []
    for chunk_move, chunk_add in zip(move.unbind(2), add.unbind(2), strict=True):
        states.append(state)
        state = chunk_add + chunk_move @ state
    start = torch.stack(states, 2)
    u = own - from_state @ start
    out = (q * decay.exp().unsqueeze(-1)) @ start + (q @ k.mT * between) @ u
    return out.flatten(2, 3)[:, :, :length]


class GatedNorm(nn.Module):
    """RMS norm over a head with a plain weight, then times silu of the gate."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps) * F.silu(gate.float())


class GatedDeltaNet(nn.Module):
    """x [B, T, H] -> [B, T, H]."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.config = config
        self.key_size = config.linear_num_key_heads * config.linear_key_head_dim
        self.value_size = config.linear_num_value_heads * config.linear_value_head_dim
        heads, wide = config.linear_num_value_heads, 2 * self.key_size + self.value_size
        self.in_proj_qkv = linear(config.hidden_size, wide)
        self.in_proj_z = linear(config.hidden_size, self.value_size)
        self.in_proj_b = linear(config.hidden_size, heads)
        self.in_proj_a = linear(config.hidden_size, heads)
        self.conv1d = nn.Conv1d(wide, wide, config.linear_conv_kernel_dim, groups=wide, bias=False)
        # Decay per token at the start: exp(-rate * step), rate 1..16, step 0.001..0.1, as in Mamba-2.
        step = torch.exp(torch.empty(heads).uniform_(math.log(1e-3), math.log(0.1)))
        self.dt_bias = nn.Parameter(step.expm1().log())  # the inverse of softplus
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
        self.norm = GatedNorm(config.linear_value_head_dim, config.rms_norm_eps)
        self.out_proj = linear(self.value_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        config = self.config
        qkv = depthwise_conv(self.in_proj_qkv(x).float(), self.conv1d.weight)
        q, k, v = qkv.split([self.key_size, self.key_size, self.value_size], -1)
        q, k = (y.unflatten(-1, (-1, config.linear_key_head_dim)).transpose(1, 2) for y in (q, k))
        # x / sqrt(sum x^2 + 1e-6) as an RMS norm; q is scaled by K^-1/2 once more.
        size = config.linear_key_head_dim
        q, k = (F.rms_norm(y, (size,), eps=1e-6 / size) for y in (q, k))
        shared = config.linear_num_value_heads // config.linear_num_key_heads
        q, k = (y.repeat_interleave(shared, 1) for y in (q / size, k / math.sqrt(size)))
        v = v.unflatten(-1, (-1, config.linear_value_head_dim)).transpose(1, 2)
        g = -self.A_log.exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias)
        beta = torch.sigmoid(self.in_proj_b(x).float())
        with torch.autocast(x.device.type, enabled=False):
            out = chunked_delta_rule(q, k, v, g.transpose(1, 2), beta.transpose(1, 2)).transpose(1, 2)
        gate = self.in_proj_z(x).unflatten(-1, (-1, config.linear_value_head_dim))
        return self.out_proj(self.norm(out, gate).flatten(-2))


def rotary(x: Tensor, positions: Tensor, config: DemoConfig) -> Tensor:
    """Rotate the first `head_dim * partial_rotary_factor` dimensions in halves. x [..., T, D], positions [T]."""
    size = int(config.head_dim * config.partial_rotary_factor)
    exponents = torch.arange(0, size, 2, device=x.device, dtype=torch.float32) / size
    angles = positions.float().unsqueeze(-1) * config.rope_theta**-exponents
    cos, sin = angles.cos(), angles.sin()
    first, second, rest = x.split([size // 2, size // 2, x.shape[-1] - size], -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


class Indexer(nn.Module):
    """Scores of complete blocks of keys for each query. x [B, T, H] -> [B, queries, T // ratio], float32, >= 0."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.config = config
        self.index_qk_proj = linear(config.hidden_size, (config.indexer_n_heads + 1) * config.indexer_head_dim)
        self.q_layernorm = OffsetNorm(config.indexer_head_dim, config.rms_norm_eps)
        self.k_layernorm = OffsetNorm(config.indexer_head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, queries: Tensor) -> Tensor:
        config, ratio = self.config, self.config.indexer_compress_ratio
        qk = self.index_qk_proj(x).float().unflatten(-1, (-1, config.indexer_head_dim)).transpose(1, 2)
        q, key = qk[:, :-1, queries], qk[:, -1]
        blocks = key[:, : x.shape[1] // ratio * ratio].unflatten(1, (-1, ratio)).mean(2)
        starts = torch.arange(blocks.shape[1], device=x.device) * ratio
        with torch.autocast(x.device.type, enabled=False):
            q = rotary(self.q_layernorm(q), queries, config)
            blocks = rotary(self.k_layernorm(blocks), starts, config)
            return F.relu(q @ blocks.unsqueeze(1).mT).sum(1) / math.sqrt(config.indexer_head_dim)


class IndexedAttention(nn.Module):
    """Causal attention, dense in training, restricted to the indexer's choice when `sparse`. x [B, T, H] -> [B, T, H].

    Choosing the best blocks has no gradient, so the indexer learns from the attention itself: `index_loss` is the KL
    divergence of softmax(scores) from the attention's mass per complete block, averaged over heads and renormalised,
    for every 8th query. The indexer's input is detached: this loss moves nothing else.
    """

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.config = config
        heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.q_proj = linear(config.hidden_size, heads * size * 2)
        self.k_proj = linear(config.hidden_size, kv_heads * size)
        self.v_proj = linear(config.hidden_size, kv_heads * size)
        self.o_proj = linear(heads * size, config.hidden_size)
        self.q_norm, self.k_norm = (OffsetNorm(size, config.rms_norm_eps) for _ in range(2))
        self.indexer = Indexer(config)
        self.sparse = False
        self.index_loss: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        config, length = self.config, x.shape[1]
        positions = torch.arange(length, device=x.device)
        q, gate = self.q_proj(x).unflatten(-1, (-1, 2 * config.head_dim)).chunk(2, -1)
        k, v = (proj(x).unflatten(-1, (-1, config.head_dim)).transpose(1, 2) for proj in (self.k_proj, self.v_proj))
        q = rotary(self.q_norm(q.transpose(1, 2)), positions, config).to(v.dtype)
        k = rotary(self.k_norm(k), positions, config).to(v.dtype)
        shared = config.num_attention_heads // config.num_key_value_heads
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        if self.sparse:
            chosen = self.choice(self.indexer(x, positions), positions)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=chosen.unsqueeze(1))
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if self.training:
            self.index_loss = self.loss(x.detach(), q.detach(), k.detach())
        return self.o_proj(out.transpose(1, 2).flatten(-2) * torch.sigmoid(gate.flatten(-2)))

    def choice(self, scores: Tensor, positions: Tensor) -> Tensor:
        """bool [B, T, T]: the keys each query may see. The lower block wins a tie."""
        config, ratio = self.config, self.config.indexer_compress_ratio
        complete = (positions + 1) // ratio
        block = torch.arange(scores.shape[-1], device=scores.device)
        scores = scores.masked_fill(block >= complete.unsqueeze(-1), -torch.inf)
        order = torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., : config.indexer_budget // ratio]
        kept = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order, True)
        kept = F.pad(kept.repeat_interleave(ratio, -1), (0, len(positions) - len(block) * ratio))
        tail = positions >= (complete * ratio).unsqueeze(-1)
        return (kept | tail) & (positions <= positions.unsqueeze(-1))

    def loss(self, x: Tensor, q: Tensor, k: Tensor) -> Tensor:
        config, ratio, length = self.config, self.config.indexer_compress_ratio, x.shape[1]
        first = -(-ratio // INDEXER_QUERY_STRIDE) * INDEXER_QUERY_STRIDE - 1  # that sees a complete block
        queries = torch.arange(first, length, INDEXER_QUERY_STRIDE, device=x.device)
        with torch.no_grad():
            logits = (q[:, :, queries] @ k.mT).float() / math.sqrt(config.head_dim)
            hidden = torch.arange(length, device=x.device) > queries.unsqueeze(-1)
            weights = logits.masked_fill(hidden, -torch.inf).softmax(-1).mean(1)
            mass = weights[..., : length // ratio * ratio].unflatten(-1, (-1, ratio)).sum(-1)
            starts_at = torch.arange(mass.shape[-1], device=x.device)
            incomplete = starts_at >= ((queries + 1) // ratio).unsqueeze(-1)
            target = mass.masked_fill(incomplete, 0)
            target = target / target.sum(-1, keepdim=True).clamp_min(1e-9)
        scores = self.indexer(x, queries).masked_fill(incomplete, -1e9)
        return (torch.xlogy(target, target) - target * scores.log_softmax(-1)).sum(-1).mean()
