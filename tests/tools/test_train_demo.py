"""The demo trainer on a tiny model: the model transformers runs, which learns, and resumes step for step."""

import dataclasses
import json

import numpy as np
import pytest
import torch
import train_demo
from demo_config import DemoConfig, read_config
from demo_export import export, load_checkpoint
from demo_mixers import UnitLowerInverse
from demo_model import DemoModel
from train_demo import SOURCES, Trainer, TrainSettings

TINY = DemoConfig(
    vocab_size=200,
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=8,
    num_experts=4,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
    hc_lowrank=8,
    ple_layer_ids=(1, 3),
    ple_embed_dim=16,
    ngram_vocab_size_base=100,
    indexer_n_heads=24,  # so many that no block's score is exactly 0: the order of ties is not defined there
    indexer_head_dim=16,
    indexer_budget=32,
    indexer_compress_ratio=8,
)
SETTINGS = TrainSettings(steps=40, batch=4, length=64, warmup=5, eval_every=8, dropout=0.1)
TOKENS = np.tile(np.random.default_rng(0).integers(0, 200, 400).astype(np.uint16), 3)


def random_model() -> DemoModel:
    """Weights far from their start, so that every part of the model shows in the logits."""
    torch.manual_seed(0)
    model = DemoModel(TINY).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.mark.oracle
@pytest.mark.parametrize("sparse", [False, True])
def test_logits_are_those_of_transformers(tmp_path, sparse):
    transformers = pytest.importorskip("transformers")
    model = random_model()
    export(model, tmp_path, torch.float32)
    oracle, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(oracle).__name__ == "Qwen4ExpForCausalLM"
    assert not any(info.values()), info
    if not sparse:
        for layer in oracle.model.layers:
            if hasattr(layer, "self_attn"):
                layer.self_attn.indexer.token_budget, layer.self_attn.indexer.block_topk = 160, 20
    model.set_sparse(sparse)
    ids = torch.randint(0, 200, (2, 130))
    ids[:, 40], ids[1, 100] = TINY.eos_token_id, TINY.eos_token_id
    with torch.no_grad():
        ours, theirs = model(ids), oracle.eval()(ids, use_cache=False).logits
    assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()


def test_the_indexer_and_the_memory_change_the_logits():
    model = random_model()
    ids = torch.randint(0, 200, (1, 130))
    with torch.no_grad():
        full = model(ids)
        model.set_sparse(True)
        restricted = model(ids)
        model.set_sparse(False)
        model.set_memory(False)
        shut = model(ids)
    assert torch.equal(full[:, :32], restricted[:, :32])  # within the budget nothing is left out
    assert not torch.allclose(full[:, 64:], restricted[:, 64:])
    assert not torch.allclose(full, shut)


def test_the_inverse_of_a_chunks_system():
    """Keys that hardly differ are the hard case: the powers of A are then huge, its inverse is not."""
    torch.manual_seed(0)
    keys = torch.nn.functional.normalize(torch.ones(64, 16) + 0.3 * torch.randn(3, 64, 16), dim=-1)
    lower = (keys @ keys.mT * torch.rand(3, 64, 1)).tril(-1)
    inverse = UnitLowerInverse.apply(lower)
    torch.testing.assert_close(inverse, torch.linalg.inv(torch.eye(64) + lower), rtol=1e-4, atol=1e-5)
    small = torch.randn(2, 8, 8, dtype=torch.float64).tril(-1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: UnitLowerInverse.apply(x.tril(-1)), small)


def test_export_and_load_are_inverse(tmp_path):
    model = random_model()
    export(model, tmp_path, torch.float32)
    assert read_config(tmp_path) == TINY
    again = DemoModel(TINY)
    load_checkpoint(again, tmp_path)
    for name, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


def test_a_few_steps_lower_the_loss_and_train_every_parameter():
    trainer = Trainer(TINY, SETTINGS, TOKENS, "cpu")
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    losses = [trainer.take_step() for _ in range(24)]
    assert losses[-1][0] < losses[0][0] - 0.3
    assert all(torch.isfinite(loss).all() for loss in losses)
    still = [name for name, value in trainer.model.named_parameters() if torch.equal(value, before[name])]
    assert not still


def test_the_indexer_learns_only_from_its_own_loss():
    trainer = Trainer(TINY, SETTINGS, TOKENS, "cpu")
    model = trainer.model.train()
    model(torch.randint(0, 200, (2, 64)))
    model.auxiliary_losses()[1].backward()
    moved = {name for name, value in model.named_parameters() if value.grad is not None and value.grad.any()}
    assert moved and all(".indexer." in name for name in moved)


def test_a_resumed_run_takes_the_same_steps(tmp_path):
    whole = Trainer(TINY, SETTINGS, TOKENS, "cpu")
    losses = [whole.take_step() for _ in range(12)]
    first = Trainer(TINY, SETTINGS, TOKENS, "cpu")
    for _ in range(5):
        first.take_step()
    first.save(tmp_path / "state.pt")
    second = Trainer(TINY, SETTINGS, TOKENS, "cpu")
    second.load(tmp_path / "state.pt")
    assert all(torch.equal(second.take_step(), loss) for loss in losses[5:])
    for ours, theirs in zip(second.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    other = Trainer(TINY, dataclasses.replace(SETTINGS, batch=2), TOKENS, "cpu")
    with pytest.raises(ValueError, match="saved with settings"):
        other.load(tmp_path / "state.pt")


@pytest.mark.gpu
def test_captured_steps_are_the_eager_ones(monkeypatch):
    """The same windows, dropout masks and learning rates, so the same losses but for the order of sums."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        captured = Trainer(TINY, SETTINGS, TOKENS, "cuda")
        losses = torch.stack([captured.take_step() for _ in range(20)])
        monkeypatch.setattr(train_demo, "WARM_STEPS", 1000)
        eager = Trainer(TINY, SETTINGS, TOKENS, "cuda")
        expected = torch.stack([eager.take_step() for _ in range(20)])
    side.synchronize()
    assert captured.graph is not None and eager.graph is None
    torch.testing.assert_close(losses[:, 0], expected[:, 0], rtol=3e-3, atol=0)
    assert losses[-1, 0] < losses[0, 0] - 0.2


def test_train_keeps_the_best_checkpoint_and_a_log(tmp_path):
    trainer = Trainer(TINY, dataclasses.replace(SETTINGS, steps=16), TOKENS, "cpu")
    held_out = {source: train_demo.held_out_windows(TOKENS[:150], 64) for source in SOURCES}
    out = tmp_path / "out"
    out.mkdir()
    train_demo.train(trainer, held_out, torch.ones(200, dtype=torch.int32), out, tmp_path / "state.pt")
    lines = [json.loads(line) for line in (out / "train.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [8, 16]
    assert min(line["nats_per_token"] for line in lines) == trainer.best
    load_checkpoint(DemoModel(TINY), out)
    assert (tmp_path / "state.pt").exists()


def test_windows_cover_the_corpus_once_an_epoch():
    settings = dataclasses.replace(SETTINGS, batch=3, length=10)
    stream = train_demo.windows(201, settings)
    per_epoch = (201 - 1) // 10 - 1
    starts = torch.cat([next(stream) for _ in range(per_epoch // 3)]).tolist()
    assert len(set(starts)) == len(starts) and len({start % 10 for start in starts}) == 1
    assert all(0 <= start <= 201 - 11 for start in starts)


def test_held_out_windows_score_every_token_but_the_first_once():
    inputs, targets = train_demo.held_out_windows(np.arange(1, 26, dtype=np.uint16), 10)
    assert inputs.shape == targets.shape == (3, 10)
    assert targets[targets != train_demo.IGNORED].tolist() == list(range(2, 26))
    assert inputs[targets != train_demo.IGNORED].tolist() == list(range(1, 25))


def test_bits_per_byte_of_a_model_that_knows_nothing():
    model = DemoModel(TINY)
    with torch.no_grad():
        model.model.embed_tokens.weight.zero_()  # all logits are 0
    held_out = {source: train_demo.held_out_windows(TOKENS[:100], 64) for source in SOURCES}
    scores = train_demo.evaluate(model, held_out, torch.full((200,), 2, dtype=torch.int32))
    assert scores["nats_per_token"] == pytest.approx(np.log(200), rel=1e-5)
    assert scores["kjv/bits_per_byte"] == pytest.approx(np.log2(200) / 2, rel=1e-5)


def test_the_full_size_fits_the_package():
    assert sum(parameter.numel() for parameter in DemoModel(DemoConfig()).parameters()) * 2 < 30_000_000


def test_the_learning_rate_warms_up_and_comes_down():
    rates = [train_demo.learning_rate(step, 0.0, SETTINGS) for step in range(SETTINGS.steps)]
    assert rates[4] == max(rates) == SETTINGS.learning_rate
    assert rates[:5] == sorted(rates[:5]) and rates[5:] == sorted(rates[5:], reverse=True)
    assert rates[-1] < 0.05 * SETTINGS.learning_rate


def test_the_learning_rate_comes_down_by_the_clock_too():
    settings = dataclasses.replace(SETTINGS, seconds=10.0)
    rates = [train_demo.learning_rate(10, elapsed, settings) for elapsed in (0.0, 5.0, 9.99)]
    assert rates[0] == train_demo.learning_rate(10, 1e9, SETTINGS)  # without --seconds the clock is nothing
    assert rates[0] > rates[1] > rates[2] and rates[2] < 0.05 * settings.learning_rate
    late = train_demo.learning_rate(SETTINGS.steps - 1, 1.0, settings)  # the steps are spent first
    assert late == train_demo.learning_rate(SETTINGS.steps - 1, 0.0, SETTINGS)


def test_a_run_stops_at_its_time_and_keeps_its_clock(tmp_path):
    settings = dataclasses.replace(SETTINGS, seconds=0.01, eval_every=1000)
    trainer = Trainer(TINY, settings, TOKENS, "cpu")
    held_out = {source: train_demo.held_out_windows(TOKENS[:65], 64) for source in SOURCES}
    train_demo.train(trainer, held_out, torch.ones(200, dtype=torch.int32), tmp_path, tmp_path / "state.pt")
    assert trainer.step < settings.steps
    load_checkpoint(DemoModel(TINY), tmp_path)
    resumed = Trainer(TINY, settings, TOKENS, "cpu")
    resumed.load(tmp_path / "state.pt")
    assert resumed.elapsed == trainer.elapsed > settings.seconds
