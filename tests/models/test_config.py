import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deltagram.models.config import FULL, LINEAR, Config, Qwen3NextConfig, Qwen4ExpConfig, parse_config, read_config
from deltagram.testing.checkpoints import TINY_SHAPES, write_tiny_checkpoint

SIZES = {"vocab_size": 264, "hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4}
QWEN3_5 = {**SIZES, "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "intermediate_size": 96}
EXPERTS = {**SIZES, "num_experts": 12, "moe_intermediate_size": 32}
QWEN3_5_MOE = {**EXPERTS, "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text"}
QWEN3_NEXT = {
    **EXPERTS,
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "intermediate_size": 96,
}
QWEN4_EXP = {
    **EXPERTS,
    "architectures": ["Qwen4ExpForCausalLM"],
    "model_type": "qwen4_exp_text",
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 64,
    "indexer_compress_ratio": 4,
    "ple_layer_ids": [5, 1, 5],
    "eos_token_id": [7, 3],
    "ple_embed_dim": 64,
}
FAMILIES = {"qwen3_5": QWEN3_5, "qwen3_5_moe": QWEN3_5_MOE, "qwen3_next": QWEN3_NEXT, "qwen4_exp": QWEN4_EXP}
CLASSES = {
    "qwen3_5_text": "Qwen3_5TextConfig",
    "qwen3_5_moe_text": "Qwen3_5MoeTextConfig",
    "qwen3_next": "Qwen3NextConfig",
    "qwen4_exp_text": "Qwen4ExpTextConfig",
}


def theirs(values: dict[str, Any]) -> Any:
    """The text config of transformers for the same JSON."""
    import transformers

    fields = copy.deepcopy(values.get("text_config") or values)
    return getattr(transformers, CLASSES[fields["model_type"]])(**fields)


def assert_same(config: Config, expected: Any) -> None:
    ours = {"family", "rope", "notes", "eos_token_ids", "stop_token_ids", "dtype"}
    for name in config.__dataclass_fields__.keys() - ours:
        value, other = getattr(config, name), getattr(expected, name, None)
        if name == "layer_types":
            other = [FULL if kind == "indexed_attention" else kind for kind in other]
        elif name == "output_gate_type":
            other = other or expected.hidden_act
        elif name == "norm_topk_prob":
            other = getattr(expected, name, True)  # Qwen3.5-MoE always does
        elif name.startswith("indexer_"):
            other = other or 0
        assert value == (tuple(other) if isinstance(other, list) else other), name
    eos = expected.eos_token_id
    assert config.eos_token_ids == tuple([] if eos is None else eos if isinstance(eos, list) else [eos])
    assert config.rope.theta == expected.rope_parameters["rope_theta"]
    assert config.rope.type == expected.rope_parameters["rope_type"]
    assert config.rope.partial_rotary_factor == expected.rope_parameters.get("partial_rotary_factor", 1.0)


@pytest.mark.oracle
@pytest.mark.parametrize("shape", TINY_SHAPES)
def test_tiny_checkpoints_read_as_transformers_reads_them(tmp_path: Path, shape: str) -> None:
    write_tiny_checkpoint(tmp_path, **TINY_SHAPES[shape])
    config = read_config(tmp_path)
    assert_same(config, theirs(json.loads((tmp_path / "config.json").read_text())))
    assert config.notes == () and config.dtype == torch.float32


@pytest.mark.oracle
@pytest.mark.parametrize("values", FAMILIES.values(), ids=FAMILIES)
def test_absent_fields_get_the_defaults_of_transformers(values: dict[str, Any]) -> None:
    assert_same(parse_config(values), theirs(values))
    assert_same(
        parse_config({**values, "full_attention_interval": 3}), theirs({**values, "full_attention_interval": 3})
    )


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
ROPES: dict[str, dict[str, Any]] = {
    "absent": {},
    "null": {"rope_parameters": None},
    "old": {"rope_theta": 1e6, "partial_rotary_factor": 0.5, "rope_scaling": None},
    "old-linear": {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "new": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.75}},
    "inner-wins": {"rope_theta": 1e6, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "scaling-wins": {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"rope_type": "linear", "factor": 3}},
    "mrope": {"rope_parameters": {"type": "default", "mrope_section": [11, 11, 10], "mrope_interleaved": True}},
    "yarn": {"rope_parameters": YARN},
    "yarn-old": {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 8}},
    "yarn-scales": {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}},
    "yarn-zero-scale": {"rope_parameters": {**YARN, "mscale": 1, "mscale_all_dim": 0}},
    "yarn-given": {"rope_parameters": {**YARN, "attention_factor": 1.25, "beta_fast": 16, "beta_slow": 2}},
    "yarn-shrinking": {"rope_parameters": {**YARN, "factor": 0.5}},
    "yarn-outer-length": {"rope_parameters": YARN, "original_max_position_embeddings": 2048},
}


@pytest.mark.oracle
@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
@pytest.mark.parametrize("values", FAMILIES.values(), ids=FAMILIES)
def test_every_form_of_rotary_settings_reads_as_in_transformers(values: dict[str, Any], rope: dict[str, Any]) -> None:
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

    config, expected = parse_config({**values, **copy.deepcopy(rope)}), theirs({**values, **rope})
    assert_same(config, expected)
    embedding = Qwen3_5TextRotaryEmbedding(expected)
    assert config.rope.attention_factor == pytest.approx(embedding.attention_scaling, rel=1e-12)
    assert config.rotary_dim == 2 * len(embedding.inv_freq)
    if config.rope.type == "yarn":
        known = expected.rope_parameters
        assert config.rope.original_max_position_embeddings == known["original_max_position_embeddings"]
        assert config.rope.factor == known["factor"]
        assert config.rope.beta_fast == known.get("beta_fast", 32) and config.rope.truncate
    assert config.notes == ()


def test_layer_types_are_normalised() -> None:
    mixed = [LINEAR, "indexed_attention", FULL, LINEAR] * 2
    config = parse_config({**QWEN4_EXP, "layer_types": mixed, "ple_layer_ids": []})
    assert config.layer_types == (LINEAR, FULL, FULL, LINEAR) * 2


def test_a_model_without_full_attention_needs_no_indexer() -> None:
    values = {name: value for name, value in QWEN4_EXP.items() if not name.startswith("indexer")}
    config = parse_config({**values, "layer_types": [LINEAR] * 8})
    assert isinstance(config, Qwen4ExpConfig) and config.indexer_budget == config.indexer_n_heads == 0


@pytest.mark.parametrize(
    ("gate", "resolved"),
    [({}, "silu"), ({"output_gate_type": None}, "silu"), ({"output_gate_type": "sigmoid"}, "sigmoid")],
)
def test_the_output_gate_is_resolved(gate: dict[str, Any], resolved: str) -> None:
    assert parse_config({**QWEN4_EXP, **gate}).output_gate_type == resolved
    assert parse_config(QWEN3_5).output_gate_type == "silu"


def nested(values: dict[str, Any], outer: dict[str, Any], inner: dict[str, Any]) -> dict[str, Any]:
    (architecture,) = values["architectures"]
    text = {name: value for name, value in values.items() if name != "architectures"}
    return {
        "architectures": [architecture.replace("ForCausalLM", "ForConditionalGeneration")],
        "model_type": values["model_type"].removesuffix("_text"),
        "text_config": {**text, **inner},
        "vision_config": {"depth": 1, "hidden_act": "gelu_pytorch_tanh"},
        **outer,
    }


@pytest.mark.parametrize("values", [QWEN3_5, QWEN3_5_MOE, QWEN4_EXP], ids=["qwen3_5", "qwen3_5_moe", "qwen4_exp"])
def test_a_multimodal_config_reads_as_its_text_config(values: dict[str, Any]) -> None:
    assert parse_config(nested(values, {}, {})) == parse_config(values)


@pytest.mark.parametrize(
    ("outer", "inner", "tied", "notes"),
    [
        ({}, {}, False, 0),
        ({"tie_word_embeddings": True}, {}, True, 0),
        ({}, {"tie_word_embeddings": True}, True, 0),
        ({"tie_word_embeddings": True}, {"tie_word_embeddings": True}, True, 0),
        ({"tie_word_embeddings": True}, {"tie_word_embeddings": False}, True, 1),
        ({"tie_word_embeddings": False}, {"tie_word_embeddings": True}, False, 1),
    ],
)
def test_the_outer_config_decides_about_tying(
    outer: dict[str, Any], inner: dict[str, Any], tied: bool, notes: int
) -> None:
    config = parse_config(nested(QWEN3_5, outer, inner))
    assert config.tie_word_embeddings is tied and len(config.notes) == notes


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({}, None),
        ({"dtype": None}, None),
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"torch_dtype": "float16"}, torch.float16),
        ({"dtype": "float32", "torch_dtype": "bfloat16"}, torch.float32),
    ],
)
def test_the_dtype_of_the_checkpoint(fields: dict[str, Any], dtype: torch.dtype | None) -> None:
    assert parse_config({**QWEN3_5, **fields}).dtype == dtype
    assert parse_config(nested(QWEN3_5, fields, {})).dtype == dtype


@pytest.mark.parametrize(
    ("config_eos", "generation_eos", "eos", "stop"),
    [
        (None, None, (), ()),
        (5, None, (5,), (5,)),
        ([5, 6], 6, (5, 6), (5, 6)),
        (5, [9, 5], (5,), (5, 9)),
        (None, 9, (), (9,)),
    ],
)
def test_stop_tokens_come_from_both_files(
    tmp_path: Path, config_eos: Any, generation_eos: Any, eos: tuple[int, ...], stop: tuple[int, ...]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3_5, "eos_token_id": config_eos}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation_eos}))
    config = read_config(tmp_path)
    assert (config.eos_token_ids, config.stop_token_ids) == (eos, stop)


WRONG_COUNTS = (0, -1, 1.5, True, "64", None, [64], 2**31)
REFUSED_BY_ALL: list[tuple[dict[str, Any], str]] = [
    *[({"hidden_size": value}, "hidden_size is") for value in WRONG_COUNTS],
    *[({"head_dim": value}, "head_dim is") for value in WRONG_COUNTS],
    ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; expected an integer in [1, 10000]"),
    *[({"rms_norm_eps": value}, "rms_norm_eps is") for value in (0, -1e-6, math.nan, math.inf, "1e-6", True, 10**400)],
    *[({"tie_word_embeddings": value}, "tie_word_embeddings is") for value in (1, "true", None)],
    ({"num_attention_heads": 5, "num_key_value_heads": 2}, "num_attention_heads is 5; expected a multiple of num_key"),
    ({"linear_num_value_heads": 24}, "linear_num_value_heads is 24; expected a multiple of linear_num_key_heads"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ({"attention_bias": True}, "attention_bias is True"),
    ({"attention_bias": 0}, "attention_bias is 0"),
    ({"attn_output_gate": False}, "attn_output_gate is False"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is {'quant_method': 'fp8'}"),
    ({"use_sliding_window": True, "sliding_window": 4096}, "use_sliding_window is True"),
    ({"sliding_window": 4096}, "sliding_window is 4096"),
    ({"per_layer_config": {"0": {}}}, "per_layer_config is"),
    ({"layer_types": [LINEAR] * 7}, "layer_types has 7 entries; expected num_hidden_layers, which is 8"),
    ({"layer_types": ["sliding_attention"] * 8}, "layer_types has sliding_attention; expected linear_attention, full"),
    ({"layer_types": "linear_attention"}, "layer_types is 'linear_attention'"),
    ({"layer_types": [1] * 8}, "layer_types is [1, 1"),
    ({"full_attention_interval": 0}, "full_attention_interval is 0"),
    *[({"eos_token_id": value}, "eos_token_id is") for value in (264, -1, "</s>", [3, True], [[3]], 3.0)],
    ({"dtype": "float8_e4m3fn"}, "dtype is 'float8_e4m3fn'; expected one of float32, bfloat16, float16"),
    ({"dtype": ["float32"]}, "dtype is ['float32']"),
    ({"rope_parameters": ["default"]}, "rope_parameters is ['default']; expected an object"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_scaling.rope_type is 'dynamic'; expected one of"),
    ({"rope_parameters": {"rope_type": ["yarn"]}}, "rope_parameters.rope_type is ['yarn']"),
    ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor is missing"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 0}}, "rope_parameters.factor is 0"),
    ({"rope_parameters": {**YARN, "beta_fast": 1, "beta_slow": 32}}, "beta_fast is 1; expected more than beta_slow"),
    ({"rope_parameters": {**YARN, "truncate": "no"}}, "rope_parameters.truncate is 'no'"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "one object per layer type (full_attention)"),
    ({"rope_theta": 1}, "rope_theta is 1; expected a number above 1"),
    ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5; expected a number above 0 and at most 1"),
    ({"head_dim": 36, "partial_rotary_factor": 0.25}, "partial_rotary_factor 0.25 of head_dim 36 is 9 dimensions"),
    ({"head_dim": 4, "partial_rotary_factor": 0.25}, "is 1 dimensions; expected an even number"),
    ({"text_config": [1]}, "text_config is [1]"),
    (
        {"architectures": ["LlamaForCausalLM"]},
        "architectures is ['LlamaForCausalLM']; supported are Qwen3_5ForCausalLM",
    ),
    ({"architectures": "Qwen3_5ForCausalLM"}, "architectures is 'Qwen3_5ForCausalLM'; supported are"),
    ({"architectures": None, "model_type": "llama"}, "model_type is 'llama'; supported are qwen3_5,"),
    ({"architectures": [], "model_type": None}, "model_type is None; supported are"),
    ({"architectures": None, "model_type": ["qwen3_5"]}, "model_type is ['qwen3_5']; supported are"),
    ({"model_type": "llama"}, "model_type is 'llama', which does not go with architecture"),
]
REFUSED_BY_QWEN4_EXP: list[tuple[dict[str, Any], str]] = [
    ({"output_gate_type": "tanh"}, "output_gate_type is 'tanh'; expected one of silu, sigmoid"),
    ({"hc_count": 1}, "hc_count is 1; expected an integer in [2,"),
    ({"ple_layer_ids": [0, 9, -1]}, "ple_layer_ids has [-1, 0, 9]; expected one-indexed layers in [1, 8]"),
    ({"ple_layer_ids": [4]}, "ple_layer_ids has [4], which are full attention layers"),
    ({"ple_layer_ids": 1}, "ple_layer_ids is 1; expected a list"),
    ({"ple_layer_ids": [True]}, "ple_layer_ids is [True]"),
    (
        {"ple_embed_dim": 65},
        "ple_embed_dim is 65; expected a multiple of (ngram_size - 1) * heads_per_ngram, which is 16",
    ),
    ({"ngram_size": 1}, "ngram_size is 1"),
    ({"seed": -1}, "seed is -1"),
    ({"split_ngram_parts": 0}, "split_ngram_parts is 0"),
    *[({"eos_token_id": value}, "eos_token_id is missing; ple_layer_ids needs one") for value in (None, [])],
    ({"indexer_budget": None}, "indexer_budget is None"),
    ({"indexer_kv_heads": 2}, "indexer_kv_heads is 2; expected 1"),
    ({"indexer_budget": 66}, "indexer_budget is 66; expected a multiple of indexer_compress_ratio, which is 4"),
    ({"indexer_head_dim": 128}, "indexer_head_dim is 128; expected at least 256"),
]
EVERY_LAYER_ALIKE: list[tuple[dict[str, Any], str]] = [
    ({"mlp_only_layers": [0]}, "mlp_only_layers is [0]"),
    ({"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
]
EXPERTS_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"num_experts_per_tok": 13}, "num_experts_per_tok is 13; expected at most num_experts, which is 12"),
    ({"norm_topk_prob": 1}, "norm_topk_prob is 1"),
    ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size is 0"),
]
REFUSED_BY = {
    "qwen3_5": [*EVERY_LAYER_ALIKE, ({"intermediate_size": 0}, "intermediate_size is 0")],
    "qwen3_5_moe": [*EVERY_LAYER_ALIKE, *EXPERTS_REFUSED, ({"norm_topk_prob": False}, "norm_topk_prob is False")],
    "qwen3_next": [
        *EXPERTS_REFUSED,
        ({"intermediate_size": 0}, "intermediate_size is 0"),
        ({"mlp_only_layers": [3, 8, -1]}, "mlp_only_layers has [-1, 8]; expected layers in [0, 7]"),
        ({"mlp_only_layers": [True]}, "mlp_only_layers is [True]"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ({"layer_types": ["indexed_attention"] * 8}, "layer_types has indexed_attention"),
    ],
    "qwen4_exp": [*EVERY_LAYER_ALIKE, *EXPERTS_REFUSED, *REFUSED_BY_QWEN4_EXP],
}
CASES = [(family, change, message) for family in FAMILIES for change, message in REFUSED_BY_ALL + REFUSED_BY[family]]


@pytest.mark.parametrize(("family", "change", "message"), CASES)
def test_what_a_model_cannot_honour_is_refused(family: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as refusal:
        parse_config({**FAMILIES[family], **change})
    assert message in str(refusal.value)
    assert str(refusal.value).count("\n- ") == 1, "one fault, one line"


REQUIRED = [(family, name) for family, values in FAMILIES.items() for name in values if name not in ("model_type",)]
OPTIONAL = {"architectures", "ple_layer_ids", "ple_embed_dim"}


@pytest.mark.parametrize(("family", "name"), [case for case in REQUIRED if case[1] not in OPTIONAL])
def test_a_missing_field_is_named(family: str, name: str) -> None:
    values = {key: value for key, value in FAMILIES[family].items() if key != name}
    with pytest.raises(ValueError, match=f"- {name} is missing"):
        parse_config(values)


@pytest.mark.parametrize(
    ("fields", "sparse"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"decoder_sparse_step": 2}, [1, 3, 5, 7]),
        ({"mlp_only_layers": [5, 1, 5], "decoder_sparse_step": 2}, [3, 7]),
        ({"mlp_only_layers": None, "decoder_sparse_step": 9}, []),
    ],
)
def test_which_layers_of_qwen3_next_have_experts(fields: dict[str, Any], sparse: list[int]) -> None:
    config = parse_config({**QWEN3_NEXT, **fields})
    assert isinstance(config, Qwen3NextConfig)
    assert [layer for layer in range(config.num_hidden_layers) if config.is_sparse(layer)] == sparse


@pytest.mark.parametrize("where", ["outer", "inner"])
def test_a_fault_is_found_at_either_level(where: str) -> None:
    change = {"quantization_config": {"bits": 4}}
    with pytest.raises(ValueError, match="quantization_config is") as refusal:
        parse_config(nested(QWEN3_5, change if where == "outer" else {}, change if where == "inner" else {}))
    assert str(refusal.value).count("\n- ") == 1
    with pytest.raises(ValueError, match=r"text_config.model_type is 'qwen4_exp_text'; expected 'qwen3_5_text'"):
        parse_config(nested(QWEN3_5, {}, {"model_type": "qwen4_exp_text"}))


def test_every_problem_is_in_one_message() -> None:
    change = {"vocab_size": None, "hidden_act": "relu", "hc_count": 0, "rope_theta": "x", "indexer_kv_heads": 3}
    with pytest.raises(ValueError) as refusal:
        parse_config({**QWEN4_EXP, **change}, source="here/config.json")
    lines = str(refusal.value).splitlines()
    assert lines[0] == "cannot use here/config.json:" and len(lines) == 6
    assert all(any(name in line for line in lines) for name in change)


def test_unknown_fields_are_named_and_known_ones_pass_in_silence() -> None:
    harmless = {"use_cache": True, "mtp_num_hidden_layers": 1, "mamba_ssm_dtype": "float32", "sliding_window": None}
    assert parse_config({**QWEN3_5, **harmless, "brand_new": None}).notes == ()
    (note,) = parse_config({**QWEN3_5, **harmless, "brand_new": 1, "other": []}).notes
    assert note == "config.json has fields that are not known here and are ignored: brand_new, other"
    (note,) = parse_config(nested(QWEN3_5, {"a": 1, "b": 1}, {"b": 2})).notes
    assert note.endswith("ignored: a, b")
    (note,) = parse_config({**QWEN3_5, "rope_parameters": {"rope_type": "default", "factor": 4, "new": 1}}).notes
    assert note == "rope_parameters has fields that rope type 'default' ignores: factor, new"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "config.json does not exist; expected a checkpoint folder"),
        (b"", "is not valid JSON"),
        (b"{", "is not valid JSON"),
        (b'{"a": "\xff"}', "is not valid JSON"),
        (b"[" * 200_000, "is not valid JSON"),
        (b'{"vocab_size": ' + b"1" * 5000 + b"}", "is not valid JSON"),
        (b"[1]", "holds a JSON list; expected an object"),
    ],
)
def test_an_unreadable_file_is_named(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError) as refusal:
        read_config(tmp_path)
    assert str(tmp_path / "config.json") in str(refusal.value) and message in str(refusal.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["factor", "rope_type"]), inner),
    max_leaves=4,
)
FIELDS = sorted({*parse_config(QWEN4_EXP).__dataclass_fields__, *QWEN4_EXP, "rope_scaling", "text_config", "dtype"})


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(FAMILIES)), st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3), JSON)
@example("qwen4_exp", {"num_hidden_layers": 1, "ple_layer_ids": [-5]}, None)
def test_any_json_is_read_or_refused(family: str, change: dict[str, Any], generation_eos: Any) -> None:
    try:
        config = parse_config({**FAMILIES[family], **change}, generation_eos=generation_eos)
    except ValueError as refusal:
        assert str(refusal).startswith("cannot use config.json:\n- ")
    else:
        assert len(config.layer_types) == config.num_hidden_layers
        hash(config)
