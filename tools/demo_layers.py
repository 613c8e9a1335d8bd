"""Norms, experts, hyper-connections and the n-gram memory of the demo model, in plain PyTorch.

Shapes: B sequences, T tokens, H hidden, S residual streams, E experts. Norms and streams are float32; the caller's
autocast covers the matmuls. Formulas are those of the Qwen4-Exp models; parameter names are their checkpoints'.
"""

import math

import torch
import torch.nn.functional as F
from demo_config import DemoConfig
from torch import Tensor, nn


class OffsetNorm(nn.Module):
    """RMS norm over groups of `group` elements with weight (1 + w), in float32."""

    def __init__(self, size: int, eps: float, group: int | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps, self.group = eps, group or size

    def forward(self, x: Tensor) -> Tensor:
        groups = x.float().unflatten(-1, (-1, self.group))
        return F.rms_norm(groups, (self.group,), eps=self.eps).flatten(-2) * (1 + self.weight)


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def depthwise_conv(x: Tensor, weight: Tensor, dilation: int = 1) -> Tensor:
    """silu of a causal depthwise convolution. x [B, T, C], weight [C, 1, kernel] -> [B, T, C]."""
    kernel = weight.shape[-1]
    taps = [F.pad(x, (0, 0, shift * dilation, 0))[:, : x.shape[1]] for shift in range(kernel)]
    terms = [tap * weight[:, 0, kernel - 1 - shift] for shift, tap in enumerate(taps)]
    return F.silu(sum(terms[1:], terms[0]))


class MLP(nn.Module):
    def __init__(self, hidden: int, size: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = linear(hidden, size), linear(hidden, size), linear(size, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    """All experts on all tokens, weighted: dense, which is quickest at this size. x [..., H], weights [..., E]."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        count, hidden, size = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * size, hidden))
        self.down_proj = nn.Parameter(torch.empty(count, hidden, size))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        count, size = self.down_proj.shape[0], self.down_proj.shape[2]
        gate, up = F.linear(x, self.gate_up_proj.flatten(0, 1)).unflatten(-1, (count, 2, size)).unbind(-2)
        inner = F.silu(gate) * up * weights.to(gate.dtype).unsqueeze(-1)
        return F.linear(inner.flatten(-2), self.down_proj.permute(1, 0, 2).flatten(1))


class SparseMoE(nn.Module):
    """Top-k experts and a gated shared one. x [B, T, H] -> [B, T, H]; `balance_loss` is Switch's, 1 when balanced."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.gate = linear(config.hidden_size, config.num_experts)
        self.experts = Experts(config)
        self.shared_expert = MLP(config.hidden_size, config.shared_expert_intermediate_size)
        self.shared_expert_gate = linear(config.hidden_size, 1)
        self.balance_loss: Tensor | None = None
        self.load: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            probabilities = self.gate(x).softmax(-1)
        top, index = probabilities.topk(self.top_k, -1)
        chosen = torch.zeros_like(probabilities).scatter(-1, index, 1.0)
        weights = probabilities * chosen / top.sum(-1, keepdim=True)
        self.load = chosen.detach().mean((0, 1))  # share of tokens per expert; sums to top_k
        self.balance_loss = (self.load / self.top_k * probabilities.mean((0, 1))).sum() * len(self.load)
        return self.experts(x, weights) + torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)


class HyperConnection(nn.Module):
    """streams [B, T, S * H] -> (block input [B, T, H], injection weights [B, T, S] or None for the last mixer)."""

    def __init__(self, config: DemoConfig, inject: bool = True) -> None:
        super().__init__()
        self.config = config
        wide = config.hc_count * config.hidden_size
        self.hc_norm = OffsetNorm(wide, config.rms_norm_eps, config.hidden_size)
        self.input_mix_weight_down = linear(wide, config.hc_lowrank)
        self.input_mix_weight_up = linear(config.hc_lowrank, wide)
        self.block_inject_weight = linear(wide, config.hc_count) if inject else None

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor | None]:
        count = self.config.hc_count
        normed = self.hc_norm(streams)
        mix = torch.sigmoid(self.input_mix_weight_up(F.silu(self.input_mix_weight_down(normed) / count)))
        mixed = (mix * normed).unflatten(-1, (count, -1)).mean(-2)
        if self.block_inject_weight is None:
            return mixed, None
        return mixed, 2 * torch.sigmoid(self.block_inject_weight(normed).float() / count)


def splitmix64(value: int) -> int:
    mask = (1 << 64) - 1
    value = (value + 0x9E3779B97F4A7C15) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)


def hash_multipliers(config: DemoConfig, memory: int) -> list[int]:
    """One odd multiplier per lookback of the `memory`-th memory layer, small enough that products fit int64."""
    half_bound = max(1, ((1 << 63) - 1) // config.vocab_size // 2)
    base = config.seed + 10007 * memory
    steps = ((base + 0x9E3779B97F4A7C15 * (i + 1)) & ((1 << 64) - 1) for i in range(config.ngram_size))
    return [2 * (splitmix64(step) % half_bound) + 1 for step in steps]


def primes_from(start: int, count: int) -> list[int]:
    """The first `count` primes >= start."""
    found: list[int] = []
    number = max(start, 2)
    while len(found) < count:
        if all(number % divisor for divisor in range(2, math.isqrt(number) + 1)):
            found.append(number)
        number += 1
    return found


class NGramEmbedding(nn.Module):
    """Hashed n-gram rows. token ids [B, T] -> [B, T, ple_embed_dim]."""

    layer_multipliers: Tensor
    ngram_heads_vocab_sizes: Tensor
    ngram_heads_offsets: Tensor

    def __init__(self, config: DemoConfig, memory: int) -> None:
        super().__init__()
        self.config = config
        heads = config.ngram_heads
        sizes = primes_from(config.ngram_vocab_size_base, (memory + 1) * heads)[memory * heads :]
        rows = math.ceil(sum(sizes) / config.make_ngram_vocab_size_divisible_by)
        rows *= config.make_ngram_vocab_size_divisible_by
        self.register_buffer("layer_multipliers", torch.tensor(hash_multipliers(config, memory)))
        self.register_buffer("ngram_heads_vocab_sizes", torch.tensor(sizes))
        self.register_buffer("ngram_heads_offsets", torch.tensor([0, *sizes[:-1]]).cumsum(0))
        self.ngram_embedding = nn.Embedding(rows, config.ple_embed_dim // heads)

    def row_ids(self, ids: Tensor) -> Tensor:
        """[B, T] -> int64 [B, T, columns]. Lookbacks stop at the sequence's start and at an earlier end of text."""
        config, length = self.config, ids.shape[1]
        position = torch.arange(length, device=ids.device).expand_as(ids)
        ends = torch.where(ids == config.eos_token_id, position, -1).cummax(1).values
        segment_start = F.pad(ends, (1, 0), value=-1)[:, :length] + 1
        mixed, columns = ids * self.layer_multipliers[0], []
        for back in range(1, config.ngram_size):
            shifted = F.pad(ids, (back, 0), value=config.eos_token_id)[:, :length]
            shifted = torch.where(position - back >= segment_start, shifted, config.eos_token_id)
            mixed = mixed ^ (shifted * self.layer_multipliers[back])
            moduli = self.ngram_heads_vocab_sizes[(back - 1) * config.heads_per_ngram : back * config.heads_per_ngram]
            columns.append(mixed.unsqueeze(-1) % moduli)
        return torch.cat(columns, -1) + self.ngram_heads_offsets

    def forward(self, ids: Tensor) -> Tensor:
        return self.ngram_embedding(self.row_ids(ids)).flatten(-2)


class Memory(nn.Module):
    """The memory fuse of one layer (PLE). streams [B, T, S * H], token ids [B, T] -> what to add to the streams."""

    def __init__(self, config: DemoConfig, memory: int, dropout: float) -> None:
        super().__init__()
        self.config, self.dropout = config, dropout
        wide = config.hc_count * config.hidden_size
        self.ple_embedding = NGramEmbedding(config, memory)
        self.key_proj = linear(config.ple_embed_dim, wide)
        self.value_proj = linear(config.ple_embed_dim, config.hidden_size)
        self.norm_key, self.norm_query, self.norm_conv = (
            OffsetNorm(wide, config.rms_norm_eps, config.hidden_size) for _ in range(3)
        )
        self.conv1d = nn.Conv1d(wide, wide, config.ple_conv_kernel_size, groups=wide, bias=False)

    def forward(self, streams: Tensor, ids: Tensor) -> Tensor:
        by_stream = (self.config.hc_count, self.config.hidden_size)
        rows = F.dropout(self.ple_embedding(ids), self.dropout, self.training)
        key = self.norm_key(self.key_proj(rows)).unflatten(-1, by_stream)
        query = self.norm_query(streams).unflatten(-1, by_stream)
        match = (key * query).sum(-1, keepdim=True) / math.sqrt(self.config.hidden_size)
        gate = torch.sigmoid(match.abs().clamp_min(1e-6).sqrt() * match.sign())
        gated = (gate * self.value_proj(rows).unsqueeze(-2)).flatten(-2)
        return gated + depthwise_conv(self.norm_conv(gated), self.conv1d.weight, self.config.ngram_size)
