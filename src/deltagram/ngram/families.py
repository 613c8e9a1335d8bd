"""Which memory a checkpoint has: family, layers, hashes and tables, from config.json and the tensors' headers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from deltagram.ngram.checkpoint import TableSource, TensorInfo, engram_table, longcat_table, qwen4_exp_table
from deltagram.ngram.spec import engram_specs, longcat_spec, qwen4_exp_spec

ENGRAM, QWEN4_EXP, LONGCAT = "DeepSeek-V4.1 Engram", "Qwen4-Exp PLE", "LongCat n-gram embedding"


def read_memory(
    config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], token_map: Callable[[], Sequence[int]]
) -> tuple[str, list[TableSource]]:
    """The family and the tables of a checkpoint with memory; ("", []) of one without.

    config: config.json's values; tensors: by the names of a text-only checkpoint; token_map: called for the family that
    needs it. Raises ValueError naming what is missing from the config, and every tensor that is not what the config
    says.
    """
    values = {**config, **config.get("text_config", {})}
    if values.get("engram_layer_ids"):
        return ENGRAM, _all(_engram(values, tensors, token_map()))
    if values.get("ple_layer_ids"):
        return QWEN4_EXP, _all(_qwen4_exp(values, tensors))
    if values.get("ngram_vocab_size_ratio"):
        return LONGCAT, _all([lambda: _longcat(values, tensors)])
    return "", []


def _all(makers: Sequence[Callable[[], TableSource]]) -> list[TableSource]:
    """Every table, or every table's problems."""
    tables, problems = [], []
    for make in makers:
        try:
            tables.append(make())
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError("\n".join(problems))
    return tables


def _take(values: Mapping[str, Any], **names: Any) -> dict[str, Any]:
    """Fields by the names that config.json gives them; a tuple is (name, default)."""
    taken, missing = {}, []
    for ours, theirs in names.items():
        name, default = theirs if isinstance(theirs, tuple) else (theirs, None)
        taken[ours] = values.get(name, default)
        if taken[ours] is None:
            missing.append(name)
    if missing:
        raise ValueError(f"config.json lacks {', '.join(missing)}, from which the n-gram memory's hashes derive")
    return taken


def _engram(
    values: Mapping[str, Any], tensors: Mapping[str, TensorInfo], token_map: Sequence[int]
) -> list[Callable[[], TableSource]]:
    fields = _take(
        values,
        compressed_vocab_size="engram_compressed_vocab_size",
        pad_token="engram_pad_token_id",
        max_order="engram_max_ngram_size",
        heads="engram_n_heads",
        base="engram_vocab_size",
        layers="engram_layer_ids",
        num_rows="engram_num_embeddings",
    )
    dim = _take(values, dim="engram_head_dim")["dim"]
    specs = engram_specs(token_map=token_map, **fields)
    return [
        lambda spec=spec, layer=layer: engram_table(spec, layer, dim, tensors)  # type: ignore[misc]
        for spec, layer in zip(specs, fields["layers"], strict=True)
    ]


def _qwen4_exp(values: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> list[Callable[[], TableSource]]:
    fields = _take(
        values,
        vocab_size="vocab_size",
        max_order=("ngram_size", 3),
        heads=("heads_per_ngram", 8),
        base=("ngram_vocab_size_base", 20_000_000),
        divisor=("make_ngram_vocab_size_divisible_by", 128),
        seed=("seed", 1234),
        end_of_sequence="eos_token_id",
    )
    fields["end_of_sequence"] = _first(fields["end_of_sequence"])
    width = _take(values, width=("ple_embed_dim", values.get("hidden_size")))["width"]
    dim = width // ((fields["max_order"] - 1) * fields["heads"])
    parts = values.get("split_ngram_parts", 512)

    def table(index: int, layer: int) -> TableSource:
        return qwen4_exp_table(qwen4_exp_spec(**fields, layer=index), layer - 1, dim, parts, tensors)

    layers = sorted(set(values["ple_layer_ids"]))
    return [lambda i=i, layer=layer: table(i, layer) for i, layer in enumerate(layers)]  # type: ignore[misc]


def _longcat(values: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> TableSource:
    fields = _take(
        values,
        vocab_size="vocab_size",
        max_order="emb_neighbor_num",
        heads="emb_split_num",
        ratio="ngram_vocab_size_ratio",
        end_of_sequence="eos_token_id",
    )
    fields["end_of_sequence"] = _first(fields["end_of_sequence"])
    ratio = fields["ratio"]
    if ratio != int(ratio):
        raise ValueError(f"ngram_vocab_size_ratio is {ratio}; expected a whole number")
    ignored = _ranges(values["special_token_scope"]) if values.get("ngram_exclude_sp_token") else []
    spec = longcat_spec(**{**fields, "ratio": int(ratio)}, ignored=ignored)
    return longcat_table(spec, values["hidden_size"] // spec.num_columns, tensors)


def _first(tokens: int | Sequence[int]) -> int:
    return tokens if isinstance(tokens, int) else tokens[0]


def _ranges(text: str) -> list[range]:
    """Of "0:4,36:55"."""
    return [range(int(first), int(end)) for first, _, end in (part.partition(":") for part in text.split(","))]
