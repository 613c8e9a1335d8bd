"""Tiny random checkpoints of every family, written as transformers 5.24 writes them, without transformers."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from deltagram.models.config import parse_config
from deltagram.testing.random_weights import random_tensors

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 256, 257, 258; before them, id = byte
END_OF_TEXT, END_OF_TURN = 256, 258

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_COMMON: dict[str, Any] = {
    "vocab_size": 264,  # five ids more than the tokenizer has, as in published checkpoints
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-4,  # the usual 1e-6 would let the norm of a near-zero head blow rounding errors up
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "attention_bias": False,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "tie_word_embeddings": False,
    "eos_token_id": [END_OF_TURN, END_OF_TEXT],
}

_LAYERS = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}

_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5": {**_COMMON, "layer_types": _LAYERS, "intermediate_size": 96},
    "qwen3_5_moe": {**_COMMON, "layer_types": _LAYERS, **_EXPERTS},
    "qwen3_next": {
        **_COMMON,
        "layer_types": _LAYERS,
        **_EXPERTS,
        "norm_topk_prob": True,
        "intermediate_size": 96,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "qwen4_exp": {
        **_COMMON,
        "layer_types": [*_LAYERS[:3], "indexed_attention"],
        **_EXPERTS,
        "norm_topk_prob": True,
        "output_gate_type": None,
        "hc_count": 2,
        "hc_lowrank": 16,
        "ple_layer_ids": [1, 3],
        "ple_embed_dim": 32,
        "ple_conv_kernel_size": 4,
        "ngram_size": 3,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 50,
        "make_ngram_vocab_size_divisible_by": 8,
        "seed": 1234,
        "split_ngram_parts": 4,
        "indexer_n_heads": 8,  # with few heads blocks tie at score 0, where implementations may choose as they like
        "indexer_kv_heads": 1,
        "indexer_head_dim": 32,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
}
_CLASS_PREFIX = {
    "qwen3_5": "Qwen3_5",
    "qwen3_5_moe": "Qwen3_5Moe",
    "qwen3_next": "Qwen3Next",
    "qwen4_exp": "Qwen4Exp",
}
_PACKED = ("qwen3_5_moe",)  # families whose experts transformers writes in one tensor a layer

_WIDE_KEYS = {"linear_key_head_dim": 32, "linear_value_head_dim": 16}
_EQUAL_HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
_GROUPS_OF_FOUR = {"linear_num_key_heads": 1, "linear_num_value_heads": 4}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "factor": 4.0}

TINY_SHAPES: dict[str, dict[str, Any]] = {
    # Sparse indexer, memory on two layers, two streams, V > K, two value heads a key head, two end tokens.
    "qwen4_exp": {"family": "qwen4_exp"},
    # Budget of the whole context, four streams, sigmoid gate, K > V, an unsplit table, tied.
    "qwen4_exp_dense": {
        "family": "qwen4_exp",
        **_WIDE_KEYS,
        **_EQUAL_HEADS,
        "indexer_budget": 512,
        "hc_count": 4,
        "output_gate_type": "sigmoid",
        "split_ngram_parts": 1,
        "tie_word_embeddings": True,
    },
    # Four value heads a key head, two sparse layers, 4-grams on one layer, one end token, more parts asked for than the
    # table divides into, packed experts, three shards.
    "qwen4_exp_packed": {
        "family": "qwen4_exp",
        **_GROUPS_OF_FOUR,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
        "num_key_value_heads": 1,
        "indexer_compress_ratio": 8,
        "indexer_budget": 8,
        "ple_layer_ids": [3],
        "ngram_size": 4,
        "heads_per_ngram": 1,
        "ple_embed_dim": 24,
        "split_ngram_parts": 100,
        "norm_topk_prob": False,
        "eos_token_id": END_OF_TEXT,
        "packed_experts": True,
        "shards": 3,
    },
    "qwen4_exp_no_memory": {"family": "qwen4_exp", "ple_layer_ids": [], "num_experts": 3, "num_experts_per_tok": 3},
    "qwen4_exp_multimodal": {"family": "qwen4_exp", "multimodal": True, "shards": 2, "hc_count": 3},
    "qwen3_5": {"family": "qwen3_5"},
    "qwen3_5_tied": {"family": "qwen3_5", **_WIDE_KEYS, **_GROUPS_OF_FOUR, "tie_word_embeddings": True, "shards": 2},
    "qwen3_5_yarn": {
        "family": "qwen3_5",
        **_EQUAL_HEADS,
        "num_key_value_heads": 4,
        "rope_parameters": {**_YARN, "original_max_position_embeddings": 128},
        "eos_token_id": END_OF_TEXT,
    },
    "qwen3_5_multimodal": {"family": "qwen3_5", "multimodal": True, "tie_word_embeddings": True, "head_dim": 16},
    "qwen3_5_moe": {"family": "qwen3_5_moe"},
    # Four value heads a key head, K > V, three of eight experts, three shards.
    "qwen3_5_moe_eight_experts": {
        "family": "qwen3_5_moe",
        **_WIDE_KEYS,
        **_GROUPS_OF_FOUR,
        "num_key_value_heads": 1,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "shared_expert_intermediate_size": 48,
        "shards": 3,
    },
    "qwen3_5_moe_multimodal": {"family": "qwen3_5_moe", "multimodal": True, "tie_word_embeddings": True, "shards": 2},
    "qwen3_next": {"family": "qwen3_next"},
    # A dense layer by its number, and every other one; weights of experts that do not add up to one; K > V, tied.
    "qwen3_next_dense_layers": {
        "family": "qwen3_next",
        **_WIDE_KEYS,
        **_GROUPS_OF_FOUR,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
        "norm_topk_prob": False,
        "tie_word_embeddings": True,
        "shards": 2,
    },
    "qwen3_next_packed": {
        "family": "qwen3_next",
        **_EQUAL_HEADS,
        "num_experts": 6,
        "num_experts_per_tok": 1,
        "rope_parameters": {**_YARN, "original_max_position_embeddings": 128},
        "eos_token_id": END_OF_TEXT,
        "packed_experts": True,
    },
}


def write_tiny_checkpoint(
    folder: Path,
    family: str = "qwen4_exp",
    seed: int = 0,
    *,
    shards: int = 1,
    packed_experts: bool | None = None,
    multimodal: bool = False,
    mtp: bool = False,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> Path:
    """Writes a random checkpoint of `family` ("qwen3_5", "qwen3_5_moe", "qwen3_next" or "qwen4_exp") with a byte-level
    tokenizer; returns `folder`.

    `overrides` replace fields of the family's small config.json. `shards` above 1 writes an index. `packed_experts`
    writes one tensor for all experts of a layer, or one an expert; as transformers writes the family if None. `mtp`
    adds the tensors of multi-token prediction. `multimodal` nests the text config, names the tensors as a multimodal
    model does, and adds those tensors and one of a vision tower. Raises ValueError for an unknown family or field.
    """
    if family not in _FAMILIES:
        raise ValueError(f"family is {family!r}; expected one of {', '.join(_FAMILIES)}")
    unknown = sorted(overrides.keys() - _FAMILIES[family].keys())
    if unknown:
        raise ValueError(f"{family} has no field {', '.join(unknown)}; expected some of {', '.join(_FAMILIES[family])}")
    folder.mkdir(parents=True, exist_ok=True)
    text = {**_FAMILIES[family], **overrides, "dtype": str(dtype).removeprefix("torch.")}
    values = _config_json(family, text, multimodal)
    config = parse_config(values)
    packed = family in _PACKED if packed_experts is None else packed_experts
    tensors = random_tensors(config, packed, seed, mtp or multimodal)
    if multimodal:
        tensors = {re.sub(r"^model\.", "model.language_model.", name): tensor for name, tensor in tensors.items()}
        tensors["model.visual.patch_embed.proj.weight"] = torch.ones(8, 3, 2, 2)
    tensors = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    _write_json(folder / "config.json", values)
    _write_json(folder / "generation_config.json", {"eos_token_id": text["eos_token_id"]})
    _write_weights(folder, tensors, shards)
    _write_tokenizer(folder)
    return folder


def _config_json(family: str, text: dict[str, Any], multimodal: bool) -> dict[str, Any]:
    text = {**text, "model_type": family if family == "qwen3_next" else f"{family}_text"}
    if not multimodal:
        return {"architectures": [f"{_CLASS_PREFIX[family]}ForCausalLM"], **text}
    if family == "qwen3_next":
        raise ValueError("multimodal is True, but qwen3_next is a text model")
    return {
        "architectures": [f"{_CLASS_PREFIX[family]}ForConditionalGeneration"],
        "model_type": family,
        "tie_word_embeddings": text["tie_word_embeddings"],
        "text_config": text,
        "vision_config": {"model_type": f"{family}_vision"},
        "image_token_id": 260,
    }


def _write_weights(folder: Path, tensors: dict[str, Tensor], shards: int) -> None:
    metadata = {"format": "pt"}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata)
        return
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[len(names) * shard // shards : len(names) * (shard + 1) // shards]
        save_file({name: tensors[name] for name in part}, folder / file, metadata)
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_tokenizer(folder: Path) -> None:
    # The byte-level alphabet: printable Latin-1 characters stand for themselves, the other bytes for U+0100 and on.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab={characters[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
        },
    )


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")
