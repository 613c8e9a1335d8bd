"""Writes the golden vectors of the conformance kit from implementations by others: transformers' Qwen4-Exp,
nemo-automodel's Engram, and for LongCat and the row formats the rules in Python's integers and float64.

python tests/ngram/write_golden.py          needs transformers 5.24 and nemo-automodel 0.7.0 (pip install --no-deps)
"""

import json
import random
import types
from typing import Any

import numpy as np
import torch

from deltagram.ngram.spec import engram_specs, longcat_spec, qwen4_exp_spec
from deltagram.ngram.tokens import token_map
from deltagram.ngram.verify import ids_by_the_rules
from deltagram.testing.ngram import FORMATS, random_table
from deltagram.testing.ngram_checkpoints import ENGRAM, LONGCAT, engram_hashes, engram_tokenizer, longcat_hash
from deltagram.testing.ngram_conformance import GOLDEN, SCALE, random_text, rows_by_the_rules

QWEN4_EXP = {
    "vocab_size": 50,
    "hidden_size": 4,
    "ple_layer_ids": [1, 2],
    "ple_embed_dim": 8,
    "ngram_size": 3,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 31,
    "make_ngram_vocab_size_divisible_by": 8,
    "seed": 1234,
    "eos_token_id": 3,
    "hc_count": 2,
    "ple_conv_kernel_size": 2,
    "rms_norm_eps": 1e-6,
}


def numbers(*shape: int, seed: int, step: float = 0.25) -> torch.Tensor:
    """Random multiples of `step`, which every format holds exactly."""
    drawn = np.random.default_rng(seed).integers(-8, 9, shape)
    return torch.from_numpy(drawn.astype(np.float64) * step)


def engram() -> dict[str, Any]:
    from nemo_automodel.components.models.common import BackendConfig
    from nemo_automodel.components.models.deepseek_v41.engram import DeepseekV41Engram, DeepseekV41NgramHash
    from transformers import PreTrainedTokenizerFast

    specs, tokenizer = engram_hashes(), engram_tokenizer()
    mapped = token_map(tokenizer)
    extra = {"engram_compressed_vocab_size": len(set(mapped)), "initializer_range": 0.1, "dtype": "float32"}
    config = types.SimpleNamespace(**{**ENGRAM, **extra})
    hasher = DeepseekV41NgramHash(config, PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    texts, chooser = [], random.Random(0)
    for length in (1, 2, 5, 40):
        tokens, dead = random_text(specs, length, chooser)
        ids = hasher(torch.tensor([tokens]), token_mask=~torch.tensor([dead]))[0].transpose(0, 1)
        texts.append({"tokens": tokens, "dead": dead, "ids": ids.tolist()})
    small = types.SimpleNamespace(**{**vars(config), "engram_head_dim": 2, "hidden_size": 6})
    layer = DeepseekV41Engram(small, 1, BackendConfig(attn="sdpa", linear="torch", rms_norm="torch")).double()
    wkv, q, k = numbers(18, 12, seed=1), numbers(2, 6, seed=2), numbers(2, 6, seed=3)
    rows, hidden, live = numbers(5, 12, seed=4), numbers(5, 2, 6, seed=5), [True, True, False, True, True]
    with torch.no_grad():
        layer.wkv.weight.copy_(wkv)
        layer.q_weight.copy_(q)
        layer.k_weight.copy_(k)
        layer.embed.weight[: 5 * 6] = rows.view(30, 2)
        ids = torch.arange(30).view(1, 5, 6)
        out = layer(hidden[None], ids, token_mask=torch.tensor([live]))[0]
    fuse = {
        "eps": 1e-6,
        "wkv": wkv,
        "q_weight": q,
        "k_weight": k,
        "rows": rows,
        "hidden": hidden,
        "live": live,
        "out": out,
    }
    shown = {**ENGRAM, "engram_compressed_vocab_size": len(set(mapped))}
    return {"config": shown, "token_map": mapped, "texts": texts, "fuse": fuse}


def qwen4_exp() -> dict[str, Any]:
    from transformers import Qwen4ExpTextConfig
    from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextPLELayer

    config = Qwen4ExpTextConfig(**QWEN4_EXP)
    sizes = {"vocab_size": 50, "max_order": 3, "heads": 2, "base": 31, "divisor": 8, "seed": 1234}
    specs = [qwen4_exp_spec(**sizes, end_of_sequence=3, layer=layer) for layer in range(2)]
    layers = [Qwen4ExpTextPLELayer(config, index, index).double() for index in range(2)]
    texts, chooser = [], random.Random(1)
    for length in (1, 2, 5, 40):
        tokens, _ = random_text(specs, length, chooser)
        ids = []
        for layer in layers:
            table = layer.ple_embedding.ngram_embedding
            rows = torch.arange(table.num_embeddings)[:, None].double()
            layer.ple_embedding.ngram_embedding = torch.nn.Embedding.from_pretrained(rows)
            ids.append(layer.ple_embedding(torch.tensor([tokens]), None)[0].long().tolist())
            layer.ple_embedding.ngram_embedding = table
        texts.append({"tokens": tokens, "dead": [False] * length, "ids": ids})
    layer, tokens = layers[0], texts[2]["tokens"] + texts[1]["tokens"]
    weights = {
        "key_proj.weight": numbers(8, 8, seed=1), "value_proj.weight": numbers(4, 8, seed=2),
        "norm_key.weight": numbers(8, seed=3, step=0.0625), "norm_query.weight": numbers(8, seed=4, step=0.0625),
        "norm_conv.weight": numbers(8, seed=5, step=0.0625), "conv1d.weight": numbers(8, 1, 2, seed=6),
    }  # fmt: skip
    table, streams = numbers(specs[0].num_rows, 2, seed=7), numbers(len(tokens), 2, 4, seed=8)
    with torch.no_grad():
        layer.load_state_dict({**weights, "ple_embedding.ngram_embedding.weight": table}, strict=False)
        out = streams + layer(streams.flatten(1)[None], torch.tensor([tokens]), None)[0].view_as(streams)
    fuse = {"tokens": tokens, "table": table, "weights": weights, "streams": streams, "out": out}
    return {"config": QWEN4_EXP, "texts": texts, "fuse": fuse}


def longcat() -> dict[str, Any]:
    spec, texts, chooser = longcat_hash(), [], random.Random(2)
    for length in (1, 2, 5, 40):
        tokens, dead = random_text([spec], length, chooser)
        texts.append({"tokens": tokens, "dead": dead, "ids": [ids_by_the_rules(spec, tokens, dead)]})
    words, rows, projections = numbers(3, 8, seed=1), numbers(3, 6, 2, seed=2), numbers(6, 8, 2, seed=3)
    out = (words + torch.einsum("tcd,chd->th", rows, projections)) / 7
    fuse = {"words": words, "rows": rows, "projections": projections, "out": out}
    return {"config": LONGCAT, "texts": texts, "fuse": fuse}


def rows() -> list[dict[str, Any]]:
    """A few rows of each format; a NaN is null, an infinity a string."""
    found = []
    for name, form in FORMATS.items():
        table = random_table(form, 6, seed=1).numpy()
        values = rows_by_the_rules(form, table, np.array([-1, *range(6)]), SCALE)
        listed = [[None if np.isnan(x) else float(x) if np.isfinite(x) else str(x) for x in row] for row in values]
        entry = {"format": str(form), "name": name, "scale": float(SCALE) if form.table_scale else None}
        found.append(entry | {"table": [bytes(r).hex() for r in table], "ids": [-1, *range(6)], "values": listed})
    return found


def published() -> dict[str, Any]:
    """Constants of the published models; the token map's size is all of it that they depend on."""
    first, last = engram_specs(
        token_map=range(99092), compressed_vocab_size=99092, pad_token=2, max_order=4, heads=8, base=16_000_000,
        layers=[1, 14], num_rows=[384006168, 384016682],
    )  # fmt: skip
    ple = qwen4_exp_spec(
        vocab_size=248320, max_order=3, heads=8, base=20_000_000, divisor=128, seed=1234, end_of_sequence=0, layer=0
    )
    lite = longcat_spec(vocab_size=131072, max_order=4, heads=4, ratio=78, end_of_sequence=2)
    named = {"deepseek v4.1 flash, layer 1": first, "deepseek v4.1 flash, layer 14": last}
    named |= {"qwen3.8 flash next": ple, "longcat flash lite": lite}
    return {
        name: {"multipliers": spec.multipliers, "moduli": spec.moduli, "rows": spec.num_rows}
        for name, spec in named.items()
    }


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def build() -> dict[str, Any]:
    made = {
        "engram": engram(),
        "qwen4_exp": qwen4_exp(),
        "longcat": longcat(),
        "rows": rows(),
        "published": published(),
    }
    vectors: dict[str, Any] = plain(made)
    return vectors


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(build(), separators=(",", ":")) + "\n")
