"""What a checkpoint's config.json says, as frozen dataclasses; transformers is not needed.

`read_config` reads one folder. A field the file leaves out gets the default that transformers 5.24 gives it
(`models/*/configuration_*.py`), except the sizes no published config leaves out, which are then reported as missing.
Every problem of a file goes into one `ValueError`.

What happens to a field we do not use:
- one that changes the mathematics in a way the models do not have (`quantization_config`, `attention_bias`, ...) is a
  problem unless it holds its neutral value;
- one known not to matter for running text (`initializer_range`, `vision_config`, ...) is passed over;
- any other is passed over too, but named in `notes`, which the caller shows: refusing it would lock out every file
  written by a newer tool, and saying nothing would hide a change of the model.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from deltagram.models import config_fields as groups
from deltagram.models.fields import FieldReader, read_json_object
from deltagram.models.rope import RopeConfig, read_rope

LINEAR, FULL = groups.LINEAR, groups.FULL


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The fields all families share, named as in config.json.

    `layer_types` holds "linear_attention" and "full_attention" alone. `eos_token_ids` are the config's own, whose first
    one bounds n-grams; `stop_token_ids` also has those of generation_config.json, which is where chat models keep their
    end-of-turn token. `dtype` is None when the config does not say. `notes` are lines for the user.
    """

    family: ClassVar[str]

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    layer_types: tuple[str, ...]
    linear_conv_kernel_dim: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    output_gate_type: str  # "silu" or "sigmoid": the gated norm of the linear attention layers
    attention_bias: bool  # always False: a config with biases is refused
    rope: RopeConfig
    eos_token_ids: tuple[int, ...]
    stop_token_ids: tuple[int, ...]
    dtype: torch.dtype | None
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def rotary_dim(self) -> int:
        """Leading dimensions of a head that rotary embedding turns."""
        return int(self.head_dim * self.rope.partial_rotary_factor)


@dataclass(frozen=True, kw_only=True)
class Qwen35Config(ModelConfig):
    """Qwen3.5 / 3.6 dense text model."""

    family: ClassVar[str] = "qwen3_5"

    intermediate_size: int


@dataclass(frozen=True, kw_only=True)
class MoEConfig(ModelConfig):
    """What families with experts share."""

    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool


@dataclass(frozen=True, kw_only=True)
class Qwen35MoeConfig(MoEConfig):
    """Qwen3.5 / 3.6 text model with experts in every layer. `norm_topk_prob` is always True."""

    family: ClassVar[str] = "qwen3_5_moe"


@dataclass(frozen=True, kw_only=True)
class Qwen3NextConfig(MoEConfig):
    """Qwen3-Next: experts in every `decoder_sparse_step`-th layer that is not one of `mlp_only_layers` (from 0), and a
    gated MLP of `intermediate_size` in the others."""

    family: ClassVar[str] = "qwen3_next"

    intermediate_size: int
    decoder_sparse_step: int
    mlp_only_layers: tuple[int, ...]

    def is_sparse(self, layer: int) -> bool:
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0


@dataclass(frozen=True, kw_only=True)
class Qwen4ExpConfig(MoEConfig):
    """Qwen4-Exp text model. `ple_layer_ids` are one-indexed and sorted. The `indexer_*` fields are 0 in a model without
    a full attention layer, which has no indexer."""

    family: ClassVar[str] = "qwen4_exp"

    hc_count: int
    hc_lowrank: int
    ple_layer_ids: tuple[int, ...]
    ple_embed_dim: int
    ple_conv_kernel_size: int
    ngram_size: int
    heads_per_ngram: int
    ngram_vocab_size_base: int
    make_ngram_vocab_size_divisible_by: int
    seed: int
    split_ngram_parts: int
    indexer_n_heads: int
    indexer_head_dim: int
    indexer_budget: int
    indexer_compress_ratio: int


Config = Qwen35Config | Qwen35MoeConfig | Qwen3NextConfig | Qwen4ExpConfig
ARCHITECTURES: dict[str, type[Config]] = {
    "Qwen3_5ForCausalLM": Qwen35Config,
    "Qwen3_5ForConditionalGeneration": Qwen35Config,
    "Qwen3_5MoeForCausalLM": Qwen35MoeConfig,
    "Qwen3_5MoeForConditionalGeneration": Qwen35MoeConfig,
    "Qwen3NextForCausalLM": Qwen3NextConfig,
    "Qwen4ExpForCausalLM": Qwen4ExpConfig,
    "Qwen4ExpForConditionalGeneration": Qwen4ExpConfig,
}
MODEL_TYPES: dict[str, type[Config]] = {
    "qwen3_5": Qwen35Config,
    "qwen3_5_text": Qwen35Config,
    "qwen3_5_moe": Qwen35MoeConfig,
    "qwen3_5_moe_text": Qwen35MoeConfig,
    "qwen3_next": Qwen3NextConfig,
    "qwen4_exp": Qwen4ExpConfig,
    "qwen4_exp_text": Qwen4ExpConfig,
}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Fields whose other values ask for mathematics these models do not have, with the values that ask for nothing.
_MUST_BE: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "attn_output_gate": (True,),
    "quantization_config": (None,),
    "compression_config": (None,),
    "per_layer_config": (None, {}),
    "use_sliding_window": (None, False),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
}
_EXPERTS_EVERYWHERE: dict[str, tuple[Any, ...]] = {"mlp_only_layers": (None, []), "decoder_sparse_step": (None, 1)}

_HARMLESS = frozenset(
    """
    architectures model_type auto_map transformers_version _name_or_path name_or_path text_config vision_config dtype
    torch_dtype language_model_only image_token_id video_token_id vision_start_token_id vision_end_token_id bos_token_id
    pad_token_id sep_token_id decoder_start_token_id use_cache initializer_range attention_dropout output_router_logits
    router_aux_loss_coef output_attentions output_hidden_states return_dict chunk_size_feed_forward id2label label2id
    num_labels problem_type number_of_conv_states mamba_ssm_dtype mtp mtp_num_hidden_layers mtp_use_dedicated_embeddings
    num_nextn_predict_layers max_window_layers full_attention_interval rope_parameters rope_scaling rope_theta
    partial_rotary_factor original_max_position_embeddings tie_word_embeddings eos_token_id sliding_window
    attn_implementation _attn_implementation _attn_implementation_autoset experts_implementation
    """.split()
)


def read_config(folder: Path) -> Config:
    """Reads `folder`/config.json, and the end-of-text ids of `folder`/generation_config.json if there is one.

    Raises ValueError naming every problem found.
    """
    values = read_json_object(folder / "config.json")
    generation = folder / "generation_config.json"
    generation_eos = read_json_object(generation).get("eos_token_id") if generation.is_file() else None
    return parse_config(values, generation_eos=generation_eos, source=str(folder / "config.json"))


def parse_config(values: dict[str, Any], *, generation_eos: Any = None, source: str = "config.json") -> Config:
    """The config that the JSON object `values` describes; `generation_eos` is generation_config.json's `eos_token_id`,
    and `source` names the file in the error. Raises ValueError naming every problem."""
    problems: list[str] = []
    notes: list[str] = []
    config_class = _config_class(values, problems)
    text = values if values.get("text_config") is None else values["text_config"]
    if not isinstance(text, dict):
        problems.append(f"text_config is {text!r}; expected an object with the fields of the text model")
    if config_class is None or not isinstance(text, dict):
        raise _refusal(source, problems)
    reader = FieldReader(text, problems)
    if text is not values:
        inner = text.get("model_type")
        if inner is not None and (not isinstance(inner, str) or MODEL_TYPES.get(inner) is not config_class):
            problems.append(f"text_config.model_type is {inner!r}; expected '{config_class.family}_text'")
    must_be = _MUST_BE if config_class is Qwen3NextConfig else _MUST_BE | _EXPERTS_EVERYWHERE
    for name, neutral in must_be.items():
        for level in [values] if text is values else [values, text]:
            value = level.get(name, neutral[0])
            if not any(type(value) is type(entry) and value == entry for entry in neutral):
                shown = f"{value!r:.100}"
                problems.append(f"{name} is {shown}, which these models do not have; expected {json.dumps(neutral[0])}")
    fields = _common_fields(reader, config_class, values, notes)
    more = groups.read_token_ids(reader, "generation_config.json: eos_token_id", generation_eos, fields["vocab_size"])
    fields["stop_token_ids"] = tuple(dict.fromkeys(fields["eos_token_ids"] + more))
    if issubclass(config_class, MoEConfig):
        fields |= groups.read_experts(reader, 8 if config_class is Qwen35MoeConfig else 10)
    if config_class is Qwen4ExpConfig:
        fields |= groups.read_qwen4_exp(reader, fields)
    else:
        fields["output_gate_type"] = "silu"
    if config_class in (Qwen35Config, Qwen3NextConfig):
        fields["intermediate_size"] = reader.integer("intermediate_size")
    if config_class is Qwen3NextConfig:
        fields |= groups.read_sparse_layers(reader, fields["num_hidden_layers"])
    elif config_class is Qwen35MoeConfig:
        problem = "norm_topk_prob is False, which these models do not have; expected true"
        reader.check(fields["norm_topk_prob"], problem)
    if problems:
        raise _refusal(source, problems)
    known = reader.used | _HARMLESS | must_be.keys()
    levels = (*values.items(), *text.items())
    unknown = dict.fromkeys(name for name, value in levels if name not in known and value is not None)
    if unknown:
        notes.append(f"config.json has fields that are not known here and are ignored: {', '.join(unknown)}")
    return config_class(**fields, notes=tuple(notes))


def _refusal(source: str, problems: list[str]) -> ValueError:
    return ValueError(f"cannot use {source}:\n" + "\n".join(f"- {problem}" for problem in problems))


def _config_class(values: dict[str, Any], problems: list[str]) -> type[Config] | None:
    """The class for the file's architecture or, where it names none, its model type; None with a problem noted."""
    architectures, model_type = values.get("architectures"), values.get("model_type")
    of_type = MODEL_TYPES.get(model_type) if isinstance(model_type, str) else None
    if not architectures:
        if of_type is None:
            problems.append(f"model_type is {model_type!r}; supported are {', '.join(MODEL_TYPES)}")
        return of_type
    known = isinstance(architectures, list) and len(architectures) == 1 and isinstance(architectures[0], str)
    of_architecture = ARCHITECTURES.get(architectures[0]) if known else None
    if of_architecture is None:
        problems.append(f"architectures is {architectures!r}; supported are {', '.join(ARCHITECTURES)}")
    elif model_type is not None and of_type is not of_architecture:
        problems.append(f"model_type is {model_type!r}, which does not go with architecture {architectures[0]}")
    return of_architecture


def _common_fields(
    reader: FieldReader, config_class: type[ModelConfig], outer: dict[str, Any], notes: list[str]
) -> dict[str, Any]:
    """The fields of `ModelConfig` but `output_gate_type`, `stop_token_ids` and `notes`; `outer` is the whole file."""
    text, is_qwen4 = reader.values, config_class is Qwen4ExpConfig
    fields: dict[str, Any] = {
        "vocab_size": reader.integer("vocab_size"),
        "hidden_size": reader.integer("hidden_size"),
        "num_hidden_layers": reader.integer("num_hidden_layers", maximum=10_000),
        "num_attention_heads": reader.integer("num_attention_heads"),
        "num_key_value_heads": reader.integer("num_key_value_heads", 4 if config_class is Qwen35Config else 2),
        "head_dim": reader.integer("head_dim", 256),
        "rms_norm_eps": reader.number("rms_norm_eps", 1e-6),
        "max_position_embeddings": reader.integer("max_position_embeddings", 32768),
        "linear_conv_kernel_dim": reader.integer("linear_conv_kernel_dim", 4),
        "linear_key_head_dim": reader.integer("linear_key_head_dim", 128),
        "linear_value_head_dim": reader.integer("linear_value_head_dim", 128),
        "linear_num_key_heads": reader.integer("linear_num_key_heads", 16),
        "linear_num_value_heads": reader.integer("linear_num_value_heads", 32),
        "attention_bias": False,
    }
    for parts, whole in (
        ("num_key_value_heads", "num_attention_heads"),
        ("linear_num_key_heads", "linear_num_value_heads"),
    ):
        problem = f"{whole} is {fields[whole]}; expected a multiple of {parts}, which is {fields[parts]}"
        reader.check(fields[whole] % fields[parts] == 0, problem, parts, whole)
    # The outer object decides for a multimodal checkpoint: its output layer belongs to the outer model.
    tie = reader.flag("tie_word_embeddings", False)
    if outer is not text and "tie_word_embeddings" in outer:
        tie_outer = FieldReader(outer, reader.problems).flag("tie_word_embeddings", False)
        if "tie_word_embeddings" in text and tie_outer != tie:
            notes.append(f"tie_word_embeddings: the outer {tie_outer} is used, not text_config's {tie}")
        tie = tie_outer
    fields["tie_word_embeddings"] = tie
    fields["layer_types"] = groups.read_layer_types(reader, fields["num_hidden_layers"], is_qwen4)
    fields["rope"] = read_rope(
        reader, fields["head_dim"], fields["max_position_embeddings"], 1.0 if is_qwen4 else 0.25, notes
    )
    eos = text.get("eos_token_id", outer.get("eos_token_id"))
    fields["eos_token_ids"] = groups.read_token_ids(reader, "eos_token_id", eos, fields["vocab_size"])
    named = (level[name] for level in (text, outer) for name in ("dtype", "torch_dtype") if level.get(name) is not None)
    dtype = next(named, None)
    known = dtype is None or (isinstance(dtype, str) and dtype in _DTYPES)
    reader.check(known, f"dtype is {dtype!r}; expected one of {', '.join(_DTYPES)}")
    fields["dtype"] = _DTYPES[dtype] if dtype is not None and known else None
    # Qwen configs carry a window next to the switch that turns it off.
    window = text.get("sliding_window") if "use_sliding_window" not in text else None
    reader.check(window is None, f"sliding_window is {window!r}, which these models do not have; expected null")
    return fields
