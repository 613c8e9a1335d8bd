"""Train the shipped demo model: `train_demo.py CORPUS OUT`, on one GPU in minutes, or on a CPU, slowly.

CORPUS is the folder that demo_corpus.py and demo_tokenizer.py filled. OUT receives the checkpoint with the best
held-out loss (bf16 safetensors) and `train.jsonl` (one line per evaluation); OUT-state.pt holds what `--resume` needs.
The run is a function of its arguments: step i draws its windows and dropout masks from (seed, i), so that a resumed
run takes the same steps; only with `--seconds` does the learning rate follow the clock too. On a GPU the step is a
captured graph: its thousands of small kernels would otherwise wait for Python. Loss: next-token cross entropy + 0.01 x
load balance of the experts + the indexers' loss.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from demo_config import DemoConfig
from demo_export import export
from demo_model import DemoModel
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

SOURCES = ("austen", "kjv", "tdavid", "mhcc", "chat")
HeldOut = dict[str, tuple[Tensor, Tensor]]  # source to (inputs, targets), see held_out_windows
WARM_STEPS = 3  # taken before the capture, so that libraries and the optimizer have allocated what they keep
IGNORED = -100  # cross_entropy's mark for positions without a target


@dataclass(frozen=True)
class TrainSettings:
    """Hyperparameters. Batch in sequences, length in tokens; `seconds` bounds a run, its resumed parts together."""

    steps: int = 1100
    batch: int = 16
    length: int = 2048
    learning_rate: float = 3e-3
    table_rate: float = 3.0  # the n-gram tables' learning rate, as a multiple
    warmup: int = 100
    weight_decay: float = 0.1
    dropout: float = 0.2
    eval_every: int = 100
    seconds: float = math.inf
    seed: int = 1


def windows(count: int, settings: TrainSettings) -> Iterator[Tensor]:
    """Starts of each step's windows, int64 [batch]: every epoch cuts the corpus anew, at a random offset and order."""
    per_epoch = (count - 1) // settings.length - 1
    order = torch.empty(0, dtype=torch.int64)
    epoch = 0
    while True:
        if len(order) < settings.batch:
            generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + epoch)
            offset = int(torch.randint(settings.length, (), generator=generator))
            fresh = torch.randperm(per_epoch, generator=generator) * settings.length + offset
            order, epoch = torch.cat([order, fresh]), epoch + 1
            continue
        yield order[: settings.batch]
        order = order[settings.batch :]


def learning_rate(step: int, elapsed: float, settings: TrainSettings) -> float:
    """Linear warm-up, then a cosine down to 2 % of the peak when the steps or the seconds are spent."""
    if step < settings.warmup:
        return settings.learning_rate * (step + 1) / settings.warmup
    done = max((step - settings.warmup) / max(1, settings.steps - settings.warmup), elapsed / settings.seconds)
    return settings.learning_rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


def make_optimizer(model: DemoModel, settings: TrainSettings) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices alone, a higher rate for the n-gram tables."""
    groups: dict[tuple[float, float], list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        table = name.endswith("ngram_embedding.weight")
        decays = parameter.dim() > 1 and not table and "conv1d" not in name and "embed_tokens" not in name
        key = (settings.table_rate if table else 1.0, settings.weight_decay if decays else 0.0)
        groups.setdefault(key, []).append(parameter)
    parameters = [{"params": group, "scale": key[0], "weight_decay": key[1]} for key, group in groups.items()]
    device = next(model.parameters()).device
    rest = {"betas": (0.9, 0.95), "eps": 1e-8, "fused": device.type == "cuda", "capturable": device.type == "cuda"}
    for group in parameters:
        group["lr"] = torch.tensor(0.0, device=device)  # take_step fills it in: a captured step reads it from there
    return torch.optim.AdamW(parameters, **rest)


def held_out_windows(tokens: np.ndarray, length: int) -> tuple[Tensor, Tensor]:
    """(inputs, targets), int64 [windows, length]; the last window is padded and its padding ignored."""
    count = math.ceil((len(tokens) - 1) / length)
    ids = torch.from_numpy(tokens.astype(np.int64))
    inputs = F.pad(ids[:-1], (0, count * length - len(ids) + 1)).view(count, length)
    targets = F.pad(ids[1:], (0, count * length - len(ids) + 1), value=IGNORED).view(count, length)
    return inputs, targets


@torch.no_grad()
def evaluate(model: DemoModel, held_out: HeldOut, token_bytes: Tensor) -> dict[str, float]:
    """Nats per token and bits per byte of each source and of all of them (dialogues apart), in float32 or autocast."""
    model.eval()
    device = token_bytes.device
    result: dict[str, float] = {}
    sums = {"nats": 0.0, "tokens": 0, "bytes": 0}
    for source, (inputs, targets) in held_out.items():
        nats, tokens, size = 0.0, 0, 0
        for start in range(0, len(inputs), 8):
            batch, target = inputs[start : start + 8].to(device), targets[start : start + 8].to(device)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
                logits = model(batch)
            flat = logits.float().flatten(0, 1)
            loss = F.cross_entropy(flat, target.flatten(), ignore_index=IGNORED, reduction="sum")
            real = target[target != IGNORED]
            nats, tokens, size = nats + loss.item(), tokens + len(real), size + int(token_bytes[real].sum())
        result[f"{source}/nats_per_token"] = nats / tokens
        result[f"{source}/bits_per_byte"] = nats / size / math.log(2)
        if source != "chat":
            sums = {"nats": sums["nats"] + nats, "tokens": sums["tokens"] + tokens, "bytes": sums["bytes"] + size}
    result["nats_per_token"] = sums["nats"] / sums["tokens"]
    result["bits_per_byte"] = sums["nats"] / sums["bytes"] / math.log(2)
    return result


class Trainer:
    """Model, optimizer and position of one run: `step` steps taken in `elapsed` seconds. Tensors live on `device`."""

    def __init__(self, config: DemoConfig, settings: TrainSettings, tokens: np.ndarray, device: str) -> None:
        torch.manual_seed(settings.seed)
        self.settings, self.device = settings, torch.device(device)
        self.model = DemoModel(config, settings.dropout).to(self.device)
        self.optimizer = make_optimizer(self.model, settings)
        named = list(self.model.named_parameters())
        self.trunk = [parameter for name, parameter in named if ".indexer." not in name]
        self.indexers = [parameter for name, parameter in named if ".indexer." in name]
        self.tokens = torch.from_numpy(tokens.astype(np.int32)).to(self.device)
        self.step, self.best, self.elapsed = 0, math.inf, 0.0
        self.starts = windows(len(tokens), settings)
        self.span = torch.arange(settings.length + 1, device=self.device)
        self.ids = torch.zeros(settings.batch, settings.length + 1, dtype=torch.int64, device=self.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.measured = torch.zeros(4)
        self.warm_steps = 0

    def take_step(self) -> Tensor:
        """One optimizer step; returns [loss, balance loss, index loss, gradient norm], on the device."""
        settings = self.settings
        self.model.train()
        torch.manual_seed(settings.seed * 1_000_003 + self.step)
        self.ids.copy_(self.tokens[next(self.starts).to(self.device).unsqueeze(1) + self.span])
        for group in self.optimizer.param_groups:
            group["lr"].fill_(learning_rate(self.step, self.elapsed, settings) * group["scale"])
        if self.device.type == "cuda" and self.graph is None and self.warm_steps == WARM_STEPS:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=torch.cuda.current_stream()):
                self.measured = self.run_step()
        if self.graph is not None:
            self.graph.replay()
        else:
            self.measured = self.run_step()
            self.warm_steps += 1
        self.step += 1
        return self.measured.clone()

    def run_step(self) -> Tensor:
        """The work on the device: forward, backward and update on `ids` [batch, length + 1]."""
        model = self.model
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda"):
            logits = model(self.ids[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), self.ids[:, 1:].flatten())
        balance, index = model.auxiliary_losses()
        (loss + model.config.router_aux_loss_coef * balance + index).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.trunk, 1.0)
        torch.nn.utils.clip_grad_norm_(self.indexers, 1.0)  # apart: their loss must not shrink the model's own steps
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return torch.stack([loss, balance, index, norm]).detach()

    def save(self, path: Path) -> None:
        """Everything that a resumed run needs; the settings too, which must then be the same."""
        state = {
            "settings": self.settings,
            "config": self.model.config,
            "step": self.step,
            "best": self.best,
            "elapsed": self.elapsed,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        part = path.with_suffix(".part")
        torch.save(state, part)
        part.replace(path)

    def load(self, path: Path) -> None:
        """Resume; raises ValueError if the state was saved under other settings or another model."""
        state = torch.load(path, map_location=self.device, weights_only=False)  # our own file, from this run's folder
        for name, own in (("settings", self.settings), ("config", self.model.config)):
            if state[name] != own:
                raise ValueError(f"{path} was saved with {name} {state[name]}, this run has {own}")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.best, self.elapsed = state["step"], state["best"], state["elapsed"]
        self.starts = windows(len(self.tokens), self.settings)
        for _ in range(self.step):
            next(self.starts)


def train(trainer: Trainer, held_out: HeldOut, token_bytes: Tensor, out: Path, state: Path) -> None:
    """Steps until `steps` or `seconds`; evaluates, logs, exports the best checkpoint and saves the state as it goes."""
    settings, console = trainer.settings, Console(stderr=True)
    began = time.monotonic() - trainer.elapsed
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[loss]}"))
    with Progress(*columns, console=console) as progress, (out / "train.jsonl").open("a") as log:
        task = progress.add_task("training", total=settings.steps, completed=trainer.step, loss="")
        seen = torch.zeros(4, device=trainer.device)
        since = 0
        while trainer.step < settings.steps:
            seen += trainer.take_step()
            since += 1
            progress.update(task, completed=trainer.step)
            if trainer.step % 20 == 0 and trainer.device.type == "cuda":
                torch.cuda.synchronize()  # keeps the clock honest: the queue never runs far ahead
            trainer.elapsed = time.monotonic() - began
            late = trainer.elapsed > settings.seconds
            if trainer.step % settings.eval_every and trainer.step != settings.steps and not late:
                continue
            loss, balance, index, norm = (seen / since).tolist()
            seen, since = torch.zeros_like(seen), 0
            scores = evaluate(trainer.model, held_out, token_bytes)
            line = {"step": trainer.step, "seconds": round(trainer.elapsed, 1), "train_nats_per_token": loss}
            line |= {"balance_loss": balance, "index_loss": index, "gradient_norm": norm, **scores}
            log.write(json.dumps(line) + "\n")
            log.flush()
            text = f"loss {loss:.3f}  held-out {scores['nats_per_token']:.3f}"
            progress.update(task, loss=text)
            console.log(f"step {trainer.step}  {text}  balance {balance:.3f}  index {index:.3f}  {line['seconds']} s")
            if scores["nats_per_token"] < trainer.best:
                trainer.best = scores["nats_per_token"]
                export(trainer.model, out)
            trainer.save(state)
            if late:
                console.log(f"stopped after {settings.seconds} s, at step {trainer.step}")
                break


def main() -> None:
    defaults = TrainSettings()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus", type=Path, help="folder with the token arrays")
    parser.add_argument("out", type=Path, help="folder for the best checkpoint; the resume state goes beside it")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--state", type=Path, help="file of the resume state (default: OUT-state.pt)")
    parser.add_argument("--resume", action="store_true", help="go on from the saved state")
    for name, value in vars(defaults).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"default {value}")
    options = vars(parser.parse_args())
    corpus, out, device, resume, state = (options.pop(x) for x in ("corpus", "out", "device", "resume", "state"))
    state = state or out.with_name(f"{out.name}-state.pt")
    settings = TrainSettings(**options)
    torch.set_float32_matmul_precision("high")
    if device.startswith("cuda"):
        torch.cuda.set_stream(torch.cuda.Stream(device))  # nothing can be captured on the default stream
    out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(DemoConfig(), settings, np.load(corpus / "tokens-train.npy"), device)
    if resume:
        trainer.load(state)
    held_out = {s: held_out_windows(np.load(corpus / f"tokens-heldout-{s}.npy"), settings.length) for s in SOURCES}
    train(trainer, held_out, torch.from_numpy(np.load(corpus / "token-bytes.npy")).to(device), out, state)


if __name__ == "__main__":
    main()
