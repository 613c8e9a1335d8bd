"""The tiny checkpoints are what transformers would have written, and it runs each of them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from deltagram.models.config import read_config
from deltagram.models.weights import open_checkpoint, read_tensor
from deltagram.testing.checkpoints import SPECIAL_TOKENS, TINY_SHAPES, write_tiny_checkpoint

TOKENS = (torch.arange(1, 101) * 37 % 256)[None]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for one another cost far more than these tiny operations do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def load(folder: Path) -> tuple[Any, dict[str, Any]]:
    """The model of transformers, and what it says about the loading."""
    import transformers

    (architecture,) = json.loads((folder / "config.json").read_text())["architectures"]
    model_class = getattr(transformers, architecture.replace("ForConditionalGeneration", "ForCausalLM"))
    model, report = model_class.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    return model.eval(), report


def stored(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


@pytest.mark.oracle
@pytest.mark.parametrize("shape", TINY_SHAPES)
def test_transformers_loads_runs_and_rewrites_a_tiny_checkpoint(tmp_path: Path, shape: str) -> None:
    ours = write_tiny_checkpoint(tmp_path / "ours", **TINY_SHAPES[shape])
    model, report = load(ours)
    assert not any(report.values()), report
    with torch.no_grad():
        got = model(TOKENS).logits[0]
    assert got.isfinite().all() and 0.5 < got.std() < 8 and got.argmax(-1).unique().numel() > 40

    model.save_pretrained(tmp_path / "theirs")
    written, rewritten = stored(ours), stored(tmp_path / "theirs")
    extra = {name for name in written if name.startswith(("mtp.", "model.visual."))}
    assert bool(extra) == TINY_SHAPES[shape].get("multimodal", False)
    assert written.keys() - extra == rewritten.keys()
    assert all(torch.equal(written[name], rewritten[name]) for name in rewritten)
    # transformers takes the hash constants from the file: a new model has to compute the same.
    fresh = type(model)(model.config).state_dict()
    constants = {name: value for name, value in model.state_dict().items() if value.dtype == torch.int64}
    assert all(torch.equal(value, fresh[name]) for name, value in constants.items())
    assert len(constants) == 3 * len(getattr(model.config, "ple_layer_ids", ()))


@pytest.mark.parametrize("shape", TINY_SHAPES)
def test_our_reader_sees_the_same_tensors(tmp_path: Path, shape: str) -> None:
    write_tiny_checkpoint(tmp_path, **TINY_SHAPES[shape])
    written = stored(tmp_path)
    checkpoint = open_checkpoint(tmp_path, mtp=any(name.startswith("mtp.") for name in written))
    assert read_config(tmp_path).stop_token_ids
    infos = list(checkpoint.tensors.values())
    assert written.keys() - {info.name for info in infos} <= {"model.visual.patch_embed.proj.weight"}
    assert all(torch.equal(read_tensor(info), written[info.name]) for info in infos)
    assert len({info.file for info in infos}) == TINY_SHAPES[shape].get("shards", 1)


@pytest.mark.oracle
def test_every_part_of_a_tiny_model_moves_its_logits(tmp_path: Path) -> None:
    parts = (
        ".ngram_embedding.",
        ".ple.conv1d.",
        ".linear_attn.conv1d.",
        ".A_log",
        ".dt_bias",
        ".self_attn.q_norm.",
        ".index_qk_proj.",
        ".indexer.k_layernorm.",
        ".block_inject_weight.",
        ".mlp.gate.",
        ".shared_expert_gate.",
        ".experts.down_proj",
    )
    model, _ = load(write_tiny_checkpoint(tmp_path))
    with torch.no_grad():
        whole = model(TOKENS[:, :48]).logits
        for part in parts:
            changed = {name: value for name, value in model.state_dict().items() if part in name}
            kept = {name: value.clone() for name, value in changed.items()}
            for name, value in changed.items():
                value.copy_(kept[name].flip(0) if len(value) > 1 else -value)
            moved = (model(TOKENS[:, :48]).logits - whole).abs().max()
            assert changed and moved > 0.02 * whole.std(), part
            for name, value in changed.items():
                value.copy_(kept[name])


def test_a_seed_gives_the_same_weights_in_any_packing(tmp_path: Path) -> None:
    one = stored(write_tiny_checkpoint(tmp_path / "one"))
    same = stored(write_tiny_checkpoint(tmp_path / "same", shards=4))
    nested = stored(write_tiny_checkpoint(tmp_path / "nested", multimodal=True))
    packed = stored(write_tiny_checkpoint(tmp_path / "packed", packed_experts=True))
    other = stored(write_tiny_checkpoint(tmp_path / "other", seed=1))
    assert all(torch.equal(one[name], same[name]) for name in one) and one.keys() == same.keys()
    assert all(
        torch.equal(value, nested[name.replace("model.", "model.language_model.", 1)])
        for name, value in one.items()
        if name.startswith("model.")
    )
    assert all(torch.equal(one[name], packed[name]) for name in one.keys() & packed.keys())
    gate_up = packed["model.layers.0.mlp.experts.gate_up_proj"]
    assert torch.equal(gate_up[2, :32], one["model.layers.0.mlp.experts.2.gate_proj.weight"])
    assert torch.equal(gate_up[2, 32:], one["model.layers.0.mlp.experts.2.up_proj.weight"])
    floats = [name for name in one if one[name].is_floating_point()]
    assert not any(torch.equal(one[name], other[name]) for name in floats)


def test_a_bf16_checkpoint_says_so(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "qwen3_5", dtype=torch.bfloat16)
    assert read_config(tmp_path).dtype == torch.bfloat16
    assert {info.dtype for info in open_checkpoint(tmp_path).tensors.values()} == {torch.bfloat16}


@pytest.mark.oracle
def test_the_tokenizer_is_bytes_and_three_special_tokens(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    write_tiny_checkpoint(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = bytes(range(1, 128)).decode() + "é 漢字 🙂\r\n  x"
    assert tokenizer.encode(text).ids == list(text.encode()) and tokenizer.decode(list(text.encode())) == text
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [256, 257, 258]
    assert tokenizer.encode("a<|im_end|>b").ids == [97, 258, 98]
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "hi"}]
    rendered = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert theirs.eos_token_id == 258


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"family": "llama"}, "family is 'llama'; expected one of qwen3_5, qwen3_5_moe, qwen3_next, qwen4_exp"),
        ({"num_expert": 2}, "qwen4_exp has no field num_expert"),
        ({"family": "qwen3_5", "num_experts": 2}, "qwen3_5 has no field num_experts"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9; expected at most"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write_tiny_checkpoint(tmp_path, **arguments)
