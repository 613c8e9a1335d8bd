"""Tiny random checkpoints of the three families with n-gram memory: config, tokenizer where hashes need it, and tables.

Qwen4-Exp's is a whole model (testing/checkpoints.py); the other two hold their memory alone.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from deltagram.ngram.spec import HashSpec, engram_specs, longcat_spec
from deltagram.ngram.tokens import token_map
from deltagram.testing.checkpoints import write_tiny_checkpoint

FAMILIES = ("engram", "qwen4_exp", "longcat")
# Written twice, some of them, in ways that the token map holds to be one.
WORDS = [
    *("<pad>", "<eos>", "the", "The", " the", "cat", "CAT", "sat", "on", "a", "A", "mat"),
    *(".", " ", "\n", "é", "e", "ﬁ", "fi"),
]
ENGRAM: dict[str, Any] = {
    "engram_layer_ids": [1, 4],
    "engram_num_embeddings": [288, 600],
    "engram_max_ngram_size": 3,
    "engram_vocab_size": 37,
    "engram_n_heads": 3,
    "engram_head_dim": 64,
    "engram_pad_token_id": 0,
    "hidden_size": 32,
    "hc_mult": 2,
    "rms_norm_eps": 1e-6,
}
LONGCAT: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 24,
    "emb_neighbor_num": 4,
    "emb_split_num": 2,
    "ngram_vocab_size_ratio": 3,
    "eos_token_id": 7,
    "ngram_exclude_sp_token": True,
    "special_token_scope": "0:2,50:53",
}


def engram_tokenizer() -> Tokenizer:
    """A word a token."""
    return Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))


def engram_hashes() -> list[HashSpec]:
    """The specs of the tiny Engram checkpoint."""
    mapped = token_map(engram_tokenizer())
    return engram_specs(
        token_map=mapped,
        compressed_vocab_size=len(set(mapped)),
        pad_token=ENGRAM["engram_pad_token_id"],
        max_order=ENGRAM["engram_max_ngram_size"],
        heads=ENGRAM["engram_n_heads"],
        base=ENGRAM["engram_vocab_size"],
        layers=ENGRAM["engram_layer_ids"],
        num_rows=ENGRAM["engram_num_embeddings"],
    )


def longcat_hash() -> HashSpec:
    """The spec of the tiny LongCat checkpoint."""
    return longcat_spec(
        vocab_size=LONGCAT["vocab_size"],
        max_order=LONGCAT["emb_neighbor_num"],
        heads=LONGCAT["emb_split_num"],
        ratio=LONGCAT["ngram_vocab_size_ratio"],
        end_of_sequence=LONGCAT["eos_token_id"],
        ignored=[range(0, 2), range(50, 53)],
    )


def write_memory_checkpoint(folder: Path, family: str, seed: int = 0) -> Path:
    """Write the checkpoint of `family`, one of FAMILIES, into `folder`, and return it. Raises ValueError."""
    if family not in FAMILIES:
        raise ValueError(f"family is {family!r}; expected one of {', '.join(FAMILIES)}")
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    if family == "engram":
        specs = engram_hashes()
        config = {"model_type": "deepseek_v41", **ENGRAM}
        config["engram_compressed_vocab_size"] = len(set(specs[0].token_map or ()))
        engram_tokenizer().save(str(folder / "tokenizer.json"))
        for layer, spec in zip(ENGRAM["engram_layer_ids"], specs, strict=True):
            shape = spec.num_rows, ENGRAM["engram_head_dim"]
            values = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
            scales = torch.randint(120, 135, (shape[0], shape[1] // 32), dtype=torch.uint8, generator=generator)
            tensors[f"layers.{layer}.engram.embed.weight"] = values
            tensors[f"layers.{layer}.engram.embed.scale"] = scales.view(torch.float8_e8m0fnu)
    elif family == "longcat":
        config = {"model_type": "longcat_flash_ngram", **LONGCAT}
        for column, rows in enumerate(longcat_hash().moduli):
            table = torch.randn(rows, 4, generator=generator).bfloat16()
            tensors[f"model.ngram_embeddings.embedders.{column}.weight"] = table
    else:
        write_tiny_checkpoint(folder, "qwen4_exp", seed)
        return folder
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
