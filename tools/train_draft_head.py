"""Train a draft head for the demo model: `train_draft_head.py CORPUS MODEL OUT`, on one GPU in a minute.

CORPUS is the folder that train_demo.py reads, MODEL the checkpoint, which stays as it is. OUT receives the head and the
index that names it (demo_draft_head.export_head) and `draft-head.json`: losses, and how often a draft is accepted.
Loss: cross entropy from what the model says of a token to what the head says of it one token earlier, and again, at a
third of the weight, two tokens earlier, from the head's own streams; + 0.01 x load balance of the experts + the
indexer's loss.
"""

import argparse
import json
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from demo_config import read_config
from demo_draft_head import DraftHead, export_head, passes
from demo_export import load_checkpoint
from demo_model import DemoModel
from torch import Tensor
from train_demo import (
    IGNORED,
    SOURCES,
    HeldOut,
    TrainSettings,
    held_out_windows,
    learning_rate,
    make_optimizer,
    windows,
)

DEPTH, SECOND = 2, 1 / 3  # passes trained, and what the second one's loss counts
EVALUATED = 3
TEMPERATURE = 0.8


class HeadTrainer:
    """A head on a model that stays as it is, and the position of its run."""

    def __init__(self, model: DemoModel, settings: TrainSettings, tokens: np.ndarray, device: str) -> None:
        torch.manual_seed(settings.seed)
        self.settings, self.device = settings, torch.device(device)
        self.model = model.to(self.device).eval().requires_grad_(False)
        self.head = DraftHead(model).to(self.device)
        self.optimizer = make_optimizer(self.head, settings)
        self.tokens = torch.from_numpy(tokens.astype(np.int32)).to(self.device)
        self.starts = windows(len(tokens), settings)
        self.span = torch.arange(settings.length, device=self.device)
        self.step, self.elapsed = 0, 0.0

    def take_step(self) -> Tensor:
        """One optimizer step; returns [loss of the first pass, of the second], on the device."""
        head, settings = self.head.train(), self.settings
        layer = head.layers[0]
        ids = self.tokens[next(self.starts).to(self.device).unsqueeze(1) + self.span].long()
        for group in self.optimizer.param_groups:
            group["lr"].fill_(learning_rate(self.step, self.elapsed, settings) * group["scale"])
        losses = []
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda"):
            for ours, theirs in islice(passes(self.model, head, ids), DEPTH):
                losses.append(F.cross_entropy(ours.flatten(0, 1), theirs.softmax(-1).flatten(0, 1)))
                if len(losses) == 1:
                    beside = (
                        self.model.config.router_aux_loss_coef * layer.mlp.balance_loss + layer.self_attn.index_loss
                    )
        (losses[0] + SECOND * losses[1] + beside).backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return torch.stack(losses).detach()


@torch.no_grad()
def acceptance(model: DemoModel, head: DraftHead, held_out: HeldOut) -> dict[str, dict[str, list[float]]]:
    """Of held-out text, by source: the chance of each pass that its draft is accepted, those before it
    having been right. A draft is the head's likeliest token, or `drawn` as the sampler draws the token, from the same
    uniform number. `bound` is the chance of the model's own likeliest token, which no head's can beat."""
    head.eval()
    device = next(head.parameters()).device
    found: dict[str, dict[str, list[float]]] = {}
    for source, (inputs, targets) in held_out.items():
        sums: dict[str, list[Tensor]] = {"greedy": [], "at 0.8": [], "at 0.8, drawn": [], "at 0.8, bound": []}
        for start in range(0, len(inputs), 4):
            ids = inputs[start : start + 4].to(device)
            # Places whose every pass speaks of a token that is there.
            real = (targets[start : start + 4].to(device) != IGNORED)[:, EVALUATED:].flatten()
            rows = []
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
                for number, both in enumerate(islice(passes(model, head, ids), EVALUATED)):
                    drop = EVALUATED - 1 - number
                    ours, theirs = (x[:, drop:].flatten(0, 1)[real] for x in both)
                    guess, truth = ((x / TEMPERATURE).softmax(-1) for x in (ours, theirs))
                    draft = ours.argmax(-1, keepdim=True)
                    rows.append([
                        (draft[:, 0] == theirs.argmax(-1)).float(), truth.gather(1, draft)[:, 0],
                        _overlap(guess, truth), truth.amax(-1),
                    ])  # fmt: skip
            for name, values in zip(sums, zip(*rows, strict=True), strict=True):
                sums[name].append(torch.stack(values))
        found[source] = {
            name: [round(x, 4) for x in torch.cat(parts, 1).mean(1).tolist()] for name, parts in sums.items()
        }
    return found


def _overlap(one: Tensor, other: Tensor) -> Tensor:
    """Probability that two distributions [n, vocab] give the same token for one uniform number, read off their
    cumulative sums."""
    (low, high), (low_other, high_other) = ((x.cumsum(-1) - x, x.cumsum(-1)) for x in (one, other))
    return (torch.minimum(high, high_other) - torch.maximum(low, low_other)).clamp_min(0).sum(-1)


def main() -> None:
    defaults = TrainSettings(steps=100_000, learning_rate=2e-3, warmup=30, weight_decay=0.1, seconds=40.0)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus", type=Path, help="folder with the token arrays")
    parser.add_argument("model", type=Path, help="checkpoint folder")
    parser.add_argument("out", type=Path, help="folder for the head")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=defaults.steps)
    parser.add_argument("--batch", type=int, default=defaults.batch)
    parser.add_argument("--length", type=int, default=defaults.length)
    parser.add_argument("--learning-rate", type=float, default=defaults.learning_rate)
    parser.add_argument("--seconds", type=float, default=defaults.seconds)
    options = vars(parser.parse_args())
    corpus, folder, out, device = (options.pop(x) for x in ("corpus", "model", "out", "device"))
    settings = replace(defaults, **options)
    torch.set_float32_matmul_precision("high")
    out.mkdir(parents=True, exist_ok=True)
    model = DemoModel(read_config(folder))
    load_checkpoint(model, folder)
    train = np.load(corpus / "tokens-train.npy")
    held_out = {s: held_out_windows(np.load(corpus / f"tokens-heldout-{s}.npy"), settings.length) for s in SOURCES}
    trainer = HeadTrainer(model, settings, train, device)
    report: dict[str, object] = {"settings": settings.__dict__, "device": device, "torch": torch.__version__}
    losses: list[list[float]] = []
    began, seen, since = time.monotonic(), torch.zeros(DEPTH, device=trainer.device), 0
    while trainer.step < settings.steps and trainer.elapsed < settings.seconds:
        seen += trainer.take_step()
        since += 1
        if trainer.step % 5 == 0 and trainer.device.type == "cuda":
            torch.cuda.synchronize()  # keeps the clock honest
        trainer.elapsed = time.monotonic() - began
        if trainer.step % 25 == 0:
            losses.append([trainer.step, round(trainer.elapsed, 2), *(seen / since).tolist()])
            print(losses[-1], flush=True)
            seen, since = torch.zeros_like(seen), 0
    export_head(model, trainer.head, folder, out)
    report |= {"steps": trainer.step, "seconds": round(trainer.elapsed, 2), "losses": losses}
    (out / "draft-head.json").write_text(json.dumps(report, indent=1, default=str) + "\n")
    report["accepted"] = acceptance(model, trainer.head, held_out)
    (out / "draft-head.json").write_text(json.dumps(report, indent=1, default=str) + "\n")
    print(report["accepted"])


if __name__ == "__main__":
    main()
