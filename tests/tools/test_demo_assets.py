"""The shipped checkpoint: within its size, complete, and the same model in the trainer and in transformers."""

import json
from pathlib import Path

import pytest
import torch
from demo_config import DemoConfig, read_config
from demo_export import load_checkpoint
from demo_model import DemoModel
from tokenizers import Tokenizer

import deltagram

DEMO = Path(deltagram.__file__).parent / "assets/demo"


def test_the_folder_is_complete_and_small():
    names = {path.name for path in DEMO.iterdir()}
    index = json.loads((DEMO / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {name for name in names if name.endswith(".safetensors")}
    assert {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"} <= names
    assert sum(path.stat().st_size for path in DEMO.iterdir()) <= 32_000_000
    assert read_config(DEMO) == DemoConfig()


def test_special_tokens_have_the_ids_of_the_configs():
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert [tokenizer.token_to_id(token) for token in specials] == [0, 1, 2]
    assert tokenizer.get_vocab_size() == DemoConfig().vocab_size
    assert json.loads((DEMO / "generation_config.json").read_text())["eos_token_id"] == [0, 2]


@pytest.mark.parametrize("text", ["Naïve — “quotes” 日本 1815\r\n\n\t end ", "<|im_start|>user\nHi<|im_end|>", ""])
def test_text_survives_the_tokenizer(text):
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.oracle
def test_transformers_loads_it_and_gives_the_trainers_logits():
    transformers = pytest.importorskip("transformers")
    options = {"dtype": torch.float32, "output_loading_info": True}
    oracle, info = transformers.AutoModelForCausalLM.from_pretrained(DEMO, **options)
    assert not any(info.values()), info
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO)
    chat = [{"role": "user", "content": "Who was Emma?"}, {"role": "assistant", "content": "A lady."}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>user\nWho was Emma?<|im_end|>\n<|im_start|>assistant\nA lady.<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = torch.tensor([tokenizer(text).input_ids])
    assert ids[0].tolist() == Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode(text).ids
    model = DemoModel(DemoConfig()).eval()
    load_checkpoint(model, DEMO)
    with torch.no_grad():
        ours, theirs = model(ids), oracle.eval()(ids, use_cache=False).logits
    assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()


def test_it_has_learnt_its_sources():
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    model = DemoModel(DemoConfig()).eval()
    load_checkpoint(model, DEMO)
    ids = torch.tensor([tokenizer.encode("And it came to pass in those days, that the king of Israel").ids])
    scrambled = ids[:, torch.randperm(ids.shape[1], generator=torch.Generator().manual_seed(0))]

    def loss(tokens: torch.Tensor) -> float:
        with torch.no_grad():
            return torch.nn.functional.cross_entropy(model(tokens)[0, :-1], tokens[0, 1:]).item()

    assert loss(ids) < 2.5 < 5.0 < loss(scrambled)
    known = loss(ids)
    model.set_memory(False)
    assert loss(ids) > known + 0.2  # the n-gram memory matters
