"""Groups of a config's fields: what each may hold, and what they must be to one another. See models/config.py."""

from typing import Any

from deltagram.models.fields import FieldReader

LINEAR = "linear_attention"
FULL = "full_attention"  # in a Qwen4-Exp model: indexed attention


def read_layer_types(reader: FieldReader, num_layers: int, is_qwen4: bool) -> tuple[str, ...]:
    layer_types = reader.list_of(str, "layer_types")
    if layer_types is None:
        interval = reader.integer("full_attention_interval", 4)
        layer_types = [FULL if (layer + 1) % interval == 0 else LINEAR for layer in range(num_layers)]
    names = {LINEAR: LINEAR, FULL: FULL, **({"indexed_attention": FULL} if is_qwen4 else {})}
    strange = sorted(set(layer_types) - names.keys())
    reader.check(not strange, f"layer_types has {', '.join(strange)}; expected {', '.join(names)}")
    count = f"layer_types has {len(layer_types)} entries; expected num_hidden_layers, which is {num_layers}"
    reader.check(len(layer_types) == num_layers, count, "layer_types", "num_hidden_layers")
    return tuple(names.get(name, LINEAR) for name in layer_types)


def read_token_ids(reader: FieldReader, name: str, value: Any, vocab_size: int) -> tuple[int, ...]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    valid = all(type(token) is int and 0 <= token < vocab_size for token in ids)
    reader.check(valid, f"{name} is {value!r:.100}; expected ids in [0, {vocab_size})", "vocab_size")
    return tuple(ids) if valid else (0,)


def read_experts(reader: FieldReader, top_k: int) -> dict[str, Any]:
    fields = {
        "moe_intermediate_size": reader.integer("moe_intermediate_size"),
        "shared_expert_intermediate_size": reader.integer("shared_expert_intermediate_size", 512),
        "num_experts": reader.integer("num_experts"),
        "num_experts_per_tok": reader.integer("num_experts_per_tok", top_k),
        "norm_topk_prob": reader.flag("norm_topk_prob", True),
    }
    top_k, experts = fields["num_experts_per_tok"], fields["num_experts"]
    problem = f"num_experts_per_tok is {top_k}; expected at most num_experts, which is {experts}"
    reader.check(top_k <= experts, problem, "num_experts_per_tok", "num_experts")
    return fields


def read_sparse_layers(reader: FieldReader, num_layers: int) -> dict[str, Any]:
    dense = sorted(set(reader.list_of(int, "mlp_only_layers") or ()))
    outside = [layer for layer in dense if not 0 <= layer < num_layers]
    problem = f"mlp_only_layers has {outside}; expected layers in [0, {num_layers - 1}]"
    reader.check(not outside, problem, "mlp_only_layers", "num_hidden_layers")
    step = reader.integer("decoder_sparse_step", 1)
    return {"mlp_only_layers": tuple(dense), "decoder_sparse_step": step}


def read_qwen4_exp(reader: FieldReader, common: dict[str, Any]) -> dict[str, Any]:
    gate = reader.choice("output_gate_type", None, ("silu", "sigmoid"))
    ple_layers = sorted(set(reader.list_of(int, "ple_layer_ids") or ()))
    ple_embed_dim = reader.integer("ple_embed_dim", None)
    fields: dict[str, Any] = {
        "output_gate_type": gate or "silu",  # hidden_act, which must be silu
        "hc_count": reader.integer("hc_count", 4, minimum=2),
        "hc_lowrank": reader.integer("hc_lowrank", 320),
        "ple_layer_ids": tuple(ple_layers),
        "ple_embed_dim": common["hidden_size"] if ple_embed_dim is None else ple_embed_dim,
        "ple_conv_kernel_size": reader.integer("ple_conv_kernel_size", 4),
        "ngram_size": reader.integer("ngram_size", 3, minimum=2),
        "heads_per_ngram": reader.integer("heads_per_ngram", 8),
        "ngram_vocab_size_base": reader.integer("ngram_vocab_size_base", 20_000_000),
        "make_ngram_vocab_size_divisible_by": reader.integer("make_ngram_vocab_size_divisible_by", 128),
        "seed": reader.integer("seed", 1234, minimum=0, maximum=2**63 - 1),
        "split_ngram_parts": reader.integer("split_ngram_parts", 512),
    }
    if ple_layers:
        _check_ple(reader, fields, common)
    return fields | _indexer_fields(reader, common)


def _check_ple(reader: FieldReader, fields: dict[str, Any], common: dict[str, Any]) -> None:
    layer_types, width = common["layer_types"], fields["ple_embed_dim"]
    outside = [layer for layer in fields["ple_layer_ids"] if not 1 <= layer <= len(layer_types)]
    problem = f"ple_layer_ids has {outside}; expected one-indexed layers in [1, {len(layer_types)}]"
    reader.check(not outside, problem, "layer_types", "num_hidden_layers")
    inside = [layer for layer in fields["ple_layer_ids"] if 1 <= layer <= len(layer_types)]
    not_linear = [layer for layer in inside if layer_types[layer - 1] != LINEAR]
    problem = f"ple_layer_ids has {not_linear}, which are full attention layers; expected {LINEAR} layers"
    reader.check(not not_linear, problem, "layer_types", "full_attention_interval")
    columns = (fields["ngram_size"] - 1) * fields["heads_per_ngram"]
    problem = f"ple_embed_dim is {width}; expected a multiple of (ngram_size - 1) * heads_per_ngram, which is {columns}"
    reader.check(width % columns == 0, problem, "ple_embed_dim", "hidden_size", "ngram_size", "heads_per_ngram")
    problem = "eos_token_id is missing; ple_layer_ids needs one, as n-grams do not cross the end of a text"
    reader.check(bool(common["eos_token_ids"]), problem)


def _indexer_fields(reader: FieldReader, common: dict[str, Any]) -> dict[str, Any]:
    names = ("indexer_n_heads", "indexer_kv_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio")
    needed = FULL in common["layer_types"] or any(reader.values.get(name) is not None for name in names)
    values = {name: reader.integer(name) if needed else 0 for name in names}
    reader.used.update(names)
    key_heads = values.pop("indexer_kv_heads")
    if not needed:
        return values
    problem = f"indexer_kv_heads is {key_heads}; expected 1, as all index queries share one key"
    reader.check(key_heads == 1, problem, "indexer_kv_heads")
    budget, ratio = values["indexer_budget"], values["indexer_compress_ratio"]
    problem = f"indexer_budget is {budget}; expected a multiple of indexer_compress_ratio, which is {ratio}"
    reader.check(budget % ratio == 0, problem, "indexer_budget", "indexer_compress_ratio")
    head_dim, rotary_dim = values["indexer_head_dim"], int(common["head_dim"] * common["rope"].partial_rotary_factor)
    problem = f"indexer_head_dim is {head_dim}; expected at least {rotary_dim}, the dimensions that rotary turns"
    reader.check(rotary_dim <= head_dim, problem, "indexer_head_dim", "head_dim")
    return values
