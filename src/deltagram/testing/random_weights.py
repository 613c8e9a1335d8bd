"""Random weights for a config, by the names that transformers 5.24 gives them in a file.

They are scaled so that every part of a model moves its logits: norm weights are near their neutral value but not at it,
convolutions are not zero, and the decays of linear attention range from slow to fast.
"""

import math

import torch
from torch import Tensor

from deltagram.models.config import (
    FULL,
    Config,
    ModelConfig,
    MoEConfig,
    Qwen3NextConfig,
    Qwen4ExpConfig,
    Qwen35Config,
)
from deltagram.models.qwen4_exp import hash_spec

Shapes = dict[str, tuple[int, ...]]


def random_tensors(config: Config, packed_experts: bool, seed: int, mtp: bool = False) -> dict[str, Tensor]:
    """All tensors of the text model in fp32 (hash constants: int64), by the names of a text-only checkpoint; `mtp` adds
    those of multi-token prediction, and leaves the others as they are."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: _random(name, shape, generator) for name, shape in _shapes(config).items()}
    for layer in range(config.num_hidden_layers):
        if isinstance(config, MoEConfig) and _is_sparse(config, layer):
            _add_experts(tensors, f"model.layers.{layer}.mlp.experts", config, packed_experts, generator)
    if isinstance(config, Qwen4ExpConfig):
        for index, layer_id in enumerate(config.ple_layer_ids):
            _add_table(tensors, f"model.layers.{layer_id - 1}.ple.ple_embedding", config, index, generator)
    if mtp:
        tensors |= _mtp_tensors(config, packed_experts, torch.Generator().manual_seed(seed + 1_000_003))
    return tensors


def _mtp_tensors(config: Config, packed_experts: bool, generator: torch.Generator) -> dict[str, Tensor]:
    hidden = config.hidden_size
    shapes: Shapes = {"mtp.pre_fc_norm_embedding.weight": (hidden,)}
    if isinstance(config, Qwen4ExpConfig):
        shapes |= {f"mtp.{name}.weight": (hidden, hidden) for name in ("fc_embedding", "fc_hidden")}
        shapes |= {"mtp.pre_fc_norm_hidden.weight": (config.hc_count * hidden,)}
        shapes |= _hyper_connection("mtp.hyper_connection_mixer", config, inject=False)
    else:
        shapes |= {f"mtp.{name}.weight": (hidden,) for name in ("pre_fc_norm_hidden", "norm")}
        shapes |= {"mtp.fc.weight": (hidden, 2 * hidden)}
    sparse = isinstance(config, MoEConfig)
    shapes |= _layer("mtp.layers.0", config, full=True, sparse=sparse)
    tensors = {name: _random(name, shape, generator) for name, shape in shapes.items()}
    if isinstance(config, MoEConfig):
        _add_experts(tensors, "mtp.layers.0.mlp.experts", config, packed_experts, generator)
    return tensors


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    normal = torch.randn(shape, generator=generator)
    if name.endswith(".A_log"):
        return torch.empty(shape).uniform_(0.05, 8.0, generator=generator).log()
    if name.endswith(".dt_bias"):
        return normal - 1.0
    if name.endswith("linear_attn.norm.weight"):
        return 1.0 + 0.1 * normal
    if len(shape) == 1:  # the other norms, whose weight is added to 1
        return 0.1 * normal
    # Steep output and router weights keep the best tokens and the best experts apart.
    gain = 4.0 if name.endswith(("mlp.gate.weight", "lm_head.weight", "embed_tokens.weight")) else 1.0
    return normal * (gain / math.sqrt(math.prod(shape[1:])))


def _shapes(config: Config) -> Shapes:
    """Names and shapes of all tensors but experts and n-gram tables."""
    hidden, words = config.hidden_size, (config.vocab_size, config.hidden_size)
    shapes: Shapes = {"model.embed_tokens.weight": words}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = words
    if isinstance(config, Qwen4ExpConfig):
        shapes |= _hyper_connection("model.hyper_connection_mixer", config, inject=False)
    else:
        shapes["model.norm.weight"] = (hidden,)
    for layer, kind in enumerate(config.layer_types):
        shapes |= _layer(f"model.layers.{layer}", config, kind == FULL, _is_sparse(config, layer))
        if isinstance(config, Qwen4ExpConfig) and layer + 1 in config.ple_layer_ids:
            shapes |= _memory(f"model.layers.{layer}.ple", config)
    return shapes


def _is_sparse(config: Config, layer: int) -> bool:
    return config.is_sparse(layer) if isinstance(config, Qwen3NextConfig) else isinstance(config, MoEConfig)


def _layer(at: str, config: Config, full: bool, sparse: bool) -> Shapes:
    hidden = config.hidden_size
    shapes = _attention(f"{at}.self_attn", config) if full else _linear(f"{at}.linear_attn", config)
    if isinstance(config, Qwen4ExpConfig):
        shapes |= _hyper_connection(f"{at}.attn_hyper_connection", config)
        shapes |= _hyper_connection(f"{at}.mlp_hyper_connection", config)
    else:
        shapes |= {f"{at}.{norm}.weight": (hidden,) for norm in ("input_layernorm", "post_attention_layernorm")}
    if isinstance(config, MoEConfig) and sparse:
        shapes |= {f"{at}.mlp.gate.weight": (config.num_experts, hidden)}
        shapes |= {f"{at}.mlp.shared_expert_gate.weight": (1, hidden)}
        shapes |= _mlp(f"{at}.mlp.shared_expert", hidden, config.shared_expert_intermediate_size)
    elif isinstance(config, Qwen35Config | Qwen3NextConfig):
        shapes |= _mlp(f"{at}.mlp", hidden, config.intermediate_size)
    return shapes


def _mlp(at: str, hidden: int, inner: int) -> Shapes:
    return {
        f"{at}.gate_proj.weight": (inner, hidden),
        f"{at}.up_proj.weight": (inner, hidden),
        f"{at}.down_proj.weight": (hidden, inner),
    }


def _attention(at: str, config: ModelConfig) -> Shapes:
    hidden, width = config.hidden_size, config.head_dim
    shapes: Shapes = {
        f"{at}.q_proj.weight": (config.num_attention_heads * 2 * width, hidden),  # query and gate
        f"{at}.k_proj.weight": (config.num_key_value_heads * width, hidden),
        f"{at}.v_proj.weight": (config.num_key_value_heads * width, hidden),
        f"{at}.o_proj.weight": (hidden, config.num_attention_heads * width),
        f"{at}.q_norm.weight": (width,),
        f"{at}.k_norm.weight": (width,),
    }
    if isinstance(config, Qwen4ExpConfig):
        width = config.indexer_head_dim
        shapes |= {
            f"{at}.indexer.index_qk_proj.weight": ((config.indexer_n_heads + 1) * width, hidden),
            f"{at}.indexer.q_layernorm.weight": (width,),
            f"{at}.indexer.k_layernorm.weight": (width,),
        }
    return shapes


def _linear(at: str, config: ModelConfig) -> Shapes:
    hidden, heads = config.hidden_size, config.linear_num_value_heads
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = heads * config.linear_value_head_dim
    if isinstance(config, Qwen3NextConfig):
        project = {"in_proj_qkvz": 2 * keys + 2 * values, "in_proj_ba": 2 * heads}
    else:
        project = {"in_proj_qkv": 2 * keys + values, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
    return {f"{at}.{name}.weight": (rows, hidden) for name, rows in project.items()} | {
        f"{at}.conv1d.weight": (2 * keys + values, 1, config.linear_conv_kernel_dim),
        f"{at}.A_log": (heads,),
        f"{at}.dt_bias": (heads,),
        f"{at}.norm.weight": (config.linear_value_head_dim,),
        f"{at}.out_proj.weight": (hidden, values),
    }


def _hyper_connection(at: str, config: Qwen4ExpConfig, inject: bool = True) -> Shapes:
    streams = config.hc_count * config.hidden_size
    shapes: Shapes = {
        f"{at}.hc_norm.weight": (streams,),
        f"{at}.input_mix_weight_down.weight": (config.hc_lowrank, streams),
        f"{at}.input_mix_weight_up.weight": (streams, config.hc_lowrank),
    }
    return shapes | ({f"{at}.block_inject_weight.weight": (config.hc_count, streams)} if inject else {})


def _memory(at: str, config: Qwen4ExpConfig) -> Shapes:
    streams = config.hc_count * config.hidden_size
    return {
        f"{at}.key_proj.weight": (streams, config.ple_embed_dim),
        f"{at}.value_proj.weight": (config.hidden_size, config.ple_embed_dim),
        f"{at}.norm_key.weight": (streams,),
        f"{at}.norm_query.weight": (streams,),
        f"{at}.norm_conv.weight": (streams,),
        f"{at}.conv1d.weight": (streams, 1, config.ple_conv_kernel_size),
    }


def _add_experts(
    tensors: dict[str, Tensor], at: str, config: MoEConfig, packed: bool, generator: torch.Generator
) -> None:
    experts = []
    for _ in range(config.num_experts):
        shapes = _mlp("", config.hidden_size, config.moe_intermediate_size)
        experts.append({name: _random(name, shape, generator) for name, shape in shapes.items()})
    gate, up, down = (torch.stack([expert[name] for expert in experts]) for name in shapes)
    if packed:
        tensors |= {f"{at}.gate_up_proj": torch.cat([gate, up], dim=1), f"{at}.down_proj": down}
    else:
        tensors |= {f"{at}.{i}{name}": tensor for i, expert in enumerate(experts) for name, tensor in expert.items()}


def _add_table(
    tensors: dict[str, Tensor], at: str, config: Qwen4ExpConfig, index: int, generator: torch.Generator
) -> None:
    spec = hash_spec(config, index)
    tensors[f"{at}.layer_multipliers"] = torch.tensor(spec.multipliers)
    tensors[f"{at}.ngram_heads_vocab_sizes"] = torch.tensor(spec.moduli)
    tensors[f"{at}.ngram_heads_offsets"] = torch.tensor(spec.offsets)
    rows = torch.randn(spec.num_rows, config.ple_embed_dim // spec.num_columns, generator=generator)
    for part, shard in enumerate(rows.chunk(config.split_ngram_parts)):
        tensors[f"{at}.ngram_embedding.shard_{part}.weight"] = shard.clone()
