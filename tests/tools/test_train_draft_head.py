"""The demo's draft head: the one that the engine runs, which learns, of a model that stays as it is."""

import json
import shutil
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
import train_draft_head
from demo_config import DemoConfig
from demo_draft_head import DraftHead, export_head, passes
from demo_export import load_checkpoint
from demo_model import DemoModel
from torch import Tensor
from train_demo import SOURCES, TrainSettings, held_out_windows

import deltagram
from deltagram import LLM, SamplingParams
from deltagram.engine import runner

DEMO = Path(deltagram.__file__).parent / "assets/demo"
TINY = DemoConfig(
    vocab_size=200, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, head_dim=16, linear_num_key_heads=2,
    linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=8, num_experts=4, moe_intermediate_size=16,
    shared_expert_intermediate_size=16, hc_lowrank=8, ple_layer_ids=(1, 3), ple_embed_dim=16, ngram_vocab_size_base=100,
    indexer_n_heads=4, indexer_head_dim=16, indexer_budget=32, indexer_compress_ratio=8,
)  # fmt: skip
SETTINGS = TrainSettings(steps=60, batch=4, length=48, warmup=5, dropout=0.0)
TOKENS = np.tile(np.random.default_rng(0).integers(0, 200, 100).astype(np.uint16), 20)


def sure_model() -> DemoModel:
    """Its logits are steep, so that there is something to learn of them."""
    torch.manual_seed(0)
    model = DemoModel(TINY).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        model.model.embed_tokens.weight *= 3
    return model


def test_the_engine_drafts_what_the_head_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = DemoModel(DemoConfig()).eval()
    load_checkpoint(model, DEMO)
    head = DraftHead(model).eval()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter)).copy_(parameter.bfloat16())
    shutil.copytree(DEMO, tmp_path, dirs_exist_ok=True)
    export_head(model, head, DEMO, tmp_path)
    drafted: dict[int, int] = {}  # by position
    place = runner.place_drafts

    def watch(drafts: Tensor, count: Tensor, row: Tensor, tokens: Tensor, lengths: Tensor) -> None:
        if count[0]:
            drafted[int(lengths[row[0]])] = int(drafts[0, 0])
        place(drafts, count, row, tokens, lengths)

    monkeypatch.setattr(runner, "place_drafts", watch)
    llm = LLM(tmp_path, device="cpu", max_num_sequences=1, speculation="mtp", num_draft=1, adaptive_drafts=False)
    params = SamplingParams(max_tokens=30, temperature=0.8, seed=1, ignore_eos=True)
    done = llm.generate("It was a fine morning", params)[0]
    assert done == LLM(device="cpu", max_num_sequences=1).generate("It was a fine morning", params)[0]
    ids = torch.tensor([[*done.prompt_token_ids, *done.outputs[0].token_ids]])
    with torch.no_grad():
        ours = next(passes(model, head, ids))[0][0].argmax(-1).tolist()
    assert drafted == {at: ours[at - 2] for at in drafted}
    assert len(drafted) > 20 and len(set(drafted.values())) > 5


def test_a_head_learns_and_its_model_stays_as_it_is() -> None:
    model = sure_model()
    trunk = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = train_draft_head.HeadTrainer(model, SETTINGS, TOKENS, "cpu")
    before = {name: value.clone() for name, value in trainer.head.state_dict().items()}
    held_out = {source: held_out_windows(TOKENS[:90], 48) for source in SOURCES}
    untrained = train_draft_head.acceptance(model, trainer.head, held_out)["chat"]
    losses = torch.stack([trainer.take_step() for _ in range(SETTINGS.steps)])
    trained = train_draft_head.acceptance(model, trainer.head, held_out)["chat"]
    assert (losses[-5:].mean(0) < 0.9 * losses[:5].mean(0)).all(), losses
    assert all(torch.equal(value, trunk[name]) for name, value in model.state_dict().items())
    still = [name for name, value in trainer.head.state_dict().items() if torch.equal(value, before[name])]
    assert not still, still
    assert trained["greedy"][0] > untrained["greedy"][0] + 0.2
    assert all(chance <= bound for chance, bound in zip(trained["at 0.8"], trained["at 0.8, bound"], strict=True))


def test_what_two_distributions_have_in_common() -> None:
    one, other = torch.tensor([[0.5, 0.25, 0.25], [1, 0, 0]]), torch.tensor([[0.25, 0.5, 0.25], [0, 0, 1.0]])
    assert train_draft_head._overlap(one, one).tolist() == [1, 1]
    assert train_draft_head._overlap(one, other).tolist() == [0.75, 0]  # [0, .25) and [.5, .75) and [.75, 1)


def test_a_later_pass_goes_on_from_the_one_before() -> None:
    model = sure_model()
    head, ids = DraftHead(model).eval(), torch.randint(0, 200, (1, 20))
    with torch.no_grad():
        (first, truth), (second, later) = islice(passes(model, head, ids), 2)
        moved = list(islice(passes(model, head, torch.cat([ids[:, :10], ids[:, 10:].flip(1)], 1)), 2))
    assert torch.equal(truth[:, 1:], later) and first.shape[1] == 19 and second.shape[1] == 18
    assert torch.equal(first[:, :9], moved[0][0][:, :9]) and not torch.equal(first[:, 9], moved[0][0][:, 9])
    assert torch.allclose(second[:, :8], moved[1][0][:, :8], atol=1e-5)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("train", *(f"heldout-{source}" for source in SOURCES)):
        np.save(tmp_path / f"tokens-{name}.npy", TOKENS[:600] if name == "train" else TOKENS[:60])
    options = ["--steps", "2", "--batch", "1", "--length", "48", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["train_draft_head.py", str(tmp_path), str(DEMO), str(tmp_path / "out"), *options])
    train_draft_head.main()
    report = json.loads((tmp_path / "out/draft-head.json").read_text())
    assert report["steps"] == 2 and set(report["accepted"]) == set(SOURCES)
    assert (tmp_path / "out/draft-head.safetensors").stat().st_size < 1_500_000
