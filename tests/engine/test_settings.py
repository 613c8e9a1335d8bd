"""Sizes that the kernels of a step do not take are refused before a model is loaded, at the very number."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from deltagram.engine import settings
from deltagram.engine.settings import Settings, resolve
from deltagram.models.config import ModelConfig, Qwen4ExpConfig, read_config
from deltagram.testing.checkpoints import write_tiny_checkpoint
from deltagram.testing.shapes import qwen3_5_config

FEW_HEADS = qwen3_5_config("0.8B")  # 2 of keys, and no indexer
MANY_HEADS = replace(FEW_HEADS, num_key_value_heads=8)


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> Qwen4ExpConfig:
    config = read_config(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny")))
    assert isinstance(config, Qwen4ExpConfig)
    return replace(config, max_position_embeddings=2**20, num_key_value_heads=8, indexer_compress_ratio=16)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "find_device", lambda name, problems: torch.device(name))


def refused(config: ModelConfig, device: str = "cuda", **values: Any) -> str:
    """What the settings are refused for; nothing if they are not."""
    try:
        resolve(Settings(device=device, **values), config)
    except ValueError as error:
        return str(error).removeprefix("settings that cannot be honoured:\n")
    return ""


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(
    ("fitting", "more", "problem"),
    [
        (
            {"max_num_sequences": 1000, "max_num_tokens": 64_528},
            {"max_num_tokens": 64_529},
            "- max_num_tokens and max_num_sequences together must be at most 65528 on a GPU, got 64529 + 1000",
        ),
        (
            {"max_num_sequences": 5461, "max_num_tokens": 33_000, "speculation": "prompt_lookup", "num_draft": 5},
            {"max_num_sequences": 5462},
            "- max_num_sequences must be at most 5461 on a GPU with the model's 8 heads of keys and num_draft 5, "
            "got 5462",
        ),
        (
            {"max_num_sequences": 32_700, "max_num_tokens": 32_800},
            {"max_num_sequences": 32_800, "max_num_tokens": 32_900},
            "- max_num_tokens and max_num_sequences together must be at most 65528 on a GPU, got 32900 + 32800\n"
            "- max_num_sequences must be at most 32768 on a GPU with the model's 8 heads of keys, got 32800",
        ),
    ],
)
def test_steps_too_large_for_a_launch(fitting: dict[str, Any], more: dict[str, Any], problem: str) -> None:
    assert refused(MANY_HEADS, **fitting) == ""
    assert refused(MANY_HEADS, **fitting | more) == problem
    assert refused(MANY_HEADS, "cpu", **fitting | more) == "", "a CPU launches nothing"


@pytest.mark.usefixtures("on_gpu")
def test_fewer_heads_take_more_sequences() -> None:
    values: dict[str, Any] = {
        "max_num_sequences": 5462,
        "max_num_tokens": 33_000,
        "speculation": "prompt_lookup",
        "num_draft": 5,
    }
    assert refused(FEW_HEADS, **values) == ""
    only_linear = replace(MANY_HEADS, layer_types=("linear_attention",) * MANY_HEADS.num_hidden_layers)
    assert refused(only_linear, **values) == ""


@pytest.mark.usefixtures("on_gpu")
def test_steps_and_contexts_too_large_for_an_indexer(indexed: Qwen4ExpConfig) -> None:
    most: dict[str, Any] = {"max_context": 65_535 // 4 * 64, "max_num_tokens": 2**18 // 8}
    assert refused(indexed, **most) == "" == refused(indexed)
    assert resolve(Settings(device="cuda"), indexed).max_context == most["max_context"]
    assert refused(indexed, max_num_tokens=32_769, max_context=2**20) == (
        "- max_num_tokens must be at most 32768 on a GPU with the model's 8 heads of keys, got 32769\n"
        "- max_context must be at most 1048512 on a GPU with the model's indexer of blocks of 16 tokens, got 1048576"
    )
    assert refused(indexed, "cpu", max_num_tokens=32_769) == ""
    covering = replace(indexed, indexer_budget=2**20)
    assert refused(covering, max_num_tokens=32_769) == "", "an indexer that chooses everything is left out"


def test_a_vocabulary_that_no_sampler_takes() -> None:
    assert refused(replace(FEW_HEADS, vocab_size=2**20), "cpu") == ""
    expected = "- the model's vocab_size must be at most 1048576, got 1048577"
    assert refused(replace(FEW_HEADS, vocab_size=2**20 + 1), "cpu") == expected
