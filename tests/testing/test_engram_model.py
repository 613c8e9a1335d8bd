"""The benchmark model with Engram layers: it runs in the engine, its memory matters, and chunks do not."""

import dataclasses

import pytest
import torch

from deltagram.engine.engine import Engine
from deltagram.engine.params import SamplingParams
from deltagram.engine.settings import Settings, resolve
from deltagram.layers.basic import Factory
from deltagram.models.config import Qwen35Config
from deltagram.ngram.formats import RowFormat
from deltagram.ngram.placement import Placement
from deltagram.testing.engram_model import EngramModel, fill_rows, memory_specs
from deltagram.testing.shapes import qwen3_5_config

DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]
SMALL = {
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "eos_token_ids": (1,),
    "stop_token_ids": (1,),
}
PROMPT = [(7 * i * i + 3 * i) % 499 for i in range(150)]


def model(device: torch.device, placement: str = "device") -> EngramModel:
    config = qwen3_5_config("0.8B")
    small: Qwen35Config = dataclasses.replace(config, layer_types=config.layer_types[:4], **SMALL)  # type: ignore[arg-type]
    form = RowFormat(torch.float8_e4m3fn, 32, group=16)
    specs = memory_specs(small.vocab_size, [1, 3], base=61)
    make = Factory(device, torch.float32)
    made = EngramModel(small, 256, make, [1, 3], specs, form, placement=Placement.parse(placement))
    made.fill()
    make.pack()
    return made


def generate(made: EngramModel, device: torch.device, max_num_tokens: int, **more: bool) -> list[int]:
    settings = Settings(
        device=device.type,
        dtype="float32",
        max_context=256,
        max_num_sequences=2,
        max_num_tokens=max_num_tokens,
        **more,
    )
    engine = Engine(made, resolve(settings, made.config))
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    request = engine.add_request(PROMPT, params, 0)
    while engine.has_work:
        engine.step()
    return request.tokens[len(PROMPT) :]


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_tokens_follow_from_the_rows_and_not_from_the_chunks(device: torch.device) -> None:
    made = model(device)
    tokens = generate(made, device, 200)
    assert generate(made, device, 70) == tokens
    for store in made.stores:
        fill_rows(store.table, store.format, device, seed=1)  # type: ignore[attr-defined]
    assert generate(made, device, 200) != tokens


@pytest.mark.gpu
@pytest.mark.parametrize("placement", ["device", "host"])
def test_ahead_is_inline_and_captured_is_eager(placement: str) -> None:
    cuda = torch.device("cuda")
    every = {
        tuple(generate(model(cuda, placement), cuda, 70, run_ahead=ahead, eager=eager))
        for ahead in (True, False)
        for eager in (True, False)
    }
    assert len(every) == 1
    assert list(every.pop()) == generate(model(cuda), cuda, 70)
