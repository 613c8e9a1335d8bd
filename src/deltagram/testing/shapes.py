"""Models of published sizes with random weights: what benchmarks run, without a checkpoint."""

from typing import Any

import torch
from torch import Tensor

from deltagram.models.base import Model
from deltagram.models.config import Qwen35Config, parse_config

_COMMON: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "vocab_size": 248320,
    "head_dim": 256,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "tie_word_embeddings": True,
    "eos_token_id": 248044,
}
_SIZES: dict[str, dict[str, Any]] = {
    "0.8B": {
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 16,
    },
    "4B": {
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 32,
    },
}


def qwen3_5_config(size: str) -> Qwen35Config:
    """The config of a dense Qwen3.5 model of `size` "0.8B" or "4B"."""
    sizes = _SIZES[size]
    layers = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
    config = parse_config({**_COMMON, **sizes, "layer_types": layers * (sizes["num_hidden_layers"] // 4)})
    assert isinstance(config, Qwen35Config)
    return config


def randomise(model: Model, seed: int = 0) -> None:
    """Give every weight of `model` a random value, on its device, of a size that keeps activations finite; memory
    tables are left out."""
    generators: dict[torch.device, torch.Generator] = {}
    for name, weight in model.weights({}).items():
        for tensor in weight.parts:
            if tensor.device not in generators:
                generators[tensor.device] = torch.Generator(tensor.device).manual_seed(seed)
            if ".ngram_embedding." not in name:
                _fill(name, tensor, generators[tensor.device])


def _fill(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    if name.endswith(".A_log"):
        tensor.uniform_(0.05, 8.0, generator=generator).log_()
    elif name.endswith(".dt_bias"):
        tensor.normal_(-1.0, 1.0, generator=generator)
    elif name.endswith(("linear_attn.norm.weight", ".q_weight", ".k_weight")):  # the other norms add theirs to 1
        tensor.normal_(1.0, 0.1, generator=generator)
    elif tensor.dim() == 1:
        tensor.normal_(0.0, 0.1, generator=generator)
    else:
        tensor.normal_(0.0, tensor.shape[1:].numel() ** -0.5, generator=generator)
