"""The demo model's sizes and hyperparameters, to and from `config.json`."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class DemoConfig:
    """The fields of `config.json` (Qwen4ExpForCausalLM) that shape the model. Sizes in elements, context in tokens."""

    vocab_size: int = 4096
    hidden_size: int = 192
    num_hidden_layers: int = 12
    full_attention_interval: int = 4
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 0.5
    linear_conv_kernel_dim: int = 4
    linear_num_key_heads: int = 4
    linear_num_value_heads: int = 8
    linear_key_head_dim: int = 64
    linear_value_head_dim: int = 32
    num_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 64
    shared_expert_intermediate_size: int = 64
    hc_count: int = 2
    hc_lowrank: int = 32
    ple_layer_ids: tuple[int, ...] = (1, 6)
    ple_embed_dim: int = 128
    ple_conv_kernel_size: int = 4
    ngram_size: int = 3
    heads_per_ngram: int = 2
    ngram_vocab_size_base: int = 24000
    make_ngram_vocab_size_divisible_by: int = 128
    seed: int = 1234
    split_ngram_parts: int = 4
    indexer_n_heads: int = 4
    indexer_head_dim: int = 32
    indexer_budget: int = 1024
    indexer_compress_ratio: int = 16
    eos_token_id: int = 0
    router_aux_loss_coef: float = 0.01
    layer_types: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        kinds = tuple(
            "linear_attention" if (index + 1) % self.full_attention_interval else "full_attention"
            for index in range(self.num_hidden_layers)
        )
        object.__setattr__(self, "layer_types", kinds)
        wrong = [layer for layer in self.ple_layer_ids if kinds[layer - 1] != "linear_attention"]
        if wrong:
            raise ValueError(f"ple_layer_ids must name linear-attention layers (one-indexed), got {wrong}")

    @property
    def ngram_heads(self) -> int:
        """Rows a token reads from one memory: (orders) x (heads per order)."""
        return (self.ngram_size - 1) * self.heads_per_ngram

    def to_json(self, dtype: str) -> dict[str, object]:
        """The content of `config.json`."""
        fields = asdict(self)
        del fields["full_attention_interval"], fields["rope_theta"], fields["partial_rotary_factor"]
        quarter = self.head_dim * self.partial_rotary_factor / 2
        sections = [int(quarter) - 2 * (int(quarter) // 3), int(quarter) // 3, int(quarter) // 3]
        return {
            "architectures": ["Qwen4ExpForCausalLM"],
            "model_type": "qwen4_exp_text",
            "dtype": dtype,
            **fields,
            "hidden_act": "silu",
            "output_gate_type": "silu",
            "norm_topk_prob": True,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "indexer_kv_heads": 1,
            "bos_token_id": None,
            "pad_token_id": 0,
            "use_cache": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.rope_theta,
                "partial_rotary_factor": self.partial_rotary_factor,
                "mrope_section": sections,
                "mrope_interleaved": True,
            },
        }


def read_config(folder: Path) -> DemoConfig:
    """The trainer's config of an exported folder."""
    content = json.loads((folder / "config.json").read_text("utf-8"))
    fields: dict[str, Any] = {name: content[name] for name in DemoConfig.__dataclass_fields__ if name in content}
    fields["ple_layer_ids"] = tuple(fields["ple_layer_ids"])
    fields["full_attention_interval"] = fields.pop("layer_types").index("full_attention") + 1
    rope = content["rope_parameters"]
    return DemoConfig(**fields, rope_theta=rope["rope_theta"], partial_rotary_factor=rope["partial_rotary_factor"])
