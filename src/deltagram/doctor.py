"""`deltagram doctor`: what this machine can do, and what a checkpoint is and needs."""

import importlib.metadata
import math
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import deltagram
from deltagram import LLM, SamplingParams
from deltagram.engine.tokenizer import Tokenizer
from deltagram.llm import shipped_model
from deltagram.models.base import meta_factory
from deltagram.models.config import ModelConfig, Qwen4ExpConfig, read_config
from deltagram.models.hub import resolve_model
from deltagram.models.load import build
from deltagram.models.weights import Checkpoint, check_weights, open_checkpoint
from deltagram.ngram.cli import placement_report

_PACKAGES = ("torch", "triton", "numpy", "tokenizers", "safetensors", "jinja2", "scipy", "fastapi", "transformers")


def examine(model: str | None, console: Console) -> bool:
    """Prints the report. False if the shipped model does not run or `model` has a problem."""
    _print(console, "machine", _machine())
    shipped, fine = _try_shipped_model()
    _print(console, "shipped model", shipped)
    if model is not None:
        rows, problems = examine_checkpoint(resolve_model(model))
        _print(console, model, rows)
        for problem in problems:
            console.print(problem, style="red", markup=False, highlight=False)
        fine = fine and not problems
    return fine


def _print(console: Console, title: str, rows: list[tuple[str, str]]) -> None:
    console.print(f"\n[bold]{title}[/bold]")
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
    for name, value in rows:
        table.add_row(name, value)
    console.print(table, markup=False, highlight=False)


def _machine() -> list[tuple[str, str]]:
    rows = [
        ("deltagram", deltagram.__version__),
        ("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("packages", ", ".join(_versions())),
        ("CPU", f"{_cpu_name()}: {os.cpu_count()} logical cores, {torch.get_num_threads()} threads used"),
        ("CPU instructions", torch.backends.cpu.get_cpu_capability()),
        ("memory", _memory()),
    ]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        level = f"compute capability {properties.major}.{properties.minor}"
        rows.append((f"cuda:{index}", f"{properties.name}, {level}, {_size(free)} free of {_size(total)}"))
    if not torch.cuda.is_available():
        why = "this torch has no CUDA" if torch.version.cuda is None else "none found"
        rows.append(("GPU", f"none ({why}): models run on the CPU"))
    return rows


def _versions() -> Iterator[str]:
    for name in _PACKAGES:
        try:
            yield f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            yield f"no {name}"


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _memory() -> str:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    info = Path("/proc/meminfo")
    lines = info.read_text().splitlines() if info.exists() else []
    available = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return f"{_size(available[0])} free of {_size(total)}" if available else _size(total)


def _try_shipped_model() -> tuple[list[tuple[str, str]], bool]:
    """Loads it and generates a few tokens on each kind of device."""
    rows, fine = [], True
    for device in ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
        began = time.perf_counter()
        try:
            llm = LLM(device=device)
            loaded = time.perf_counter()
            (completion,) = llm.generate("In the", SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
            seconds = time.perf_counter() - loaded
            text = completion.outputs[0].text
            rows.append((device, f"loads in {loaded - began:.1f} s, 8 tokens in {seconds:.2f} s: In the{text!r:.60}"))
        except Exception as error:  # whatever it is, it is what the user wants to know
            rows.append((device, f"does not run: {type(error).__name__}: {error}"))
            fine = False
    return [("folder", str(shipped_model())), *rows], fine


def examine_checkpoint(folder: Path) -> tuple[list[tuple[str, str]], list[str]]:
    """What the checkpoint is, as rows, and every reason why it would not load. No weights are read."""
    rows: list[tuple[str, str]] = [("folder", str(folder))]
    problems: list[str] = []
    config: ModelConfig | None = None
    try:
        config = read_config(folder)
        rows += _config_rows(config)
    except ValueError as error:
        problems.append(str(error))
    try:
        tokenizer = Tokenizer.load(folder)
        template = "a chat template" if tokenizer.chat_template else "no chat template"
        rows.append(
            ("tokenizer", f"{tokenizer.vocab_size} tokens, {template}, end tokens {list(tokenizer.eos_token_ids)}")
        )
    except ValueError as error:
        problems.append(str(error))
    try:
        checkpoint = open_checkpoint(folder)
        rows += _checkpoint_rows(checkpoint)
        if config is not None:
            shapes = {name: info.shape for name, info in checkpoint.tensors.items()}
            shadow = build(config, 64, meta_factory(torch.bfloat16), torch.bfloat16)
            check_weights(checkpoint, shadow.weights(shapes))
        rows += placement_report(folder)
    except ValueError as error:
        problems.append(str(error))
    return rows, problems


def _config_rows(config: ModelConfig) -> list[tuple[str, str]]:
    linear = config.layer_types.count("linear_attention")
    rows = [
        ("family", config.family),
        ("layers", f"{linear} linear attention, {config.num_hidden_layers - linear} attention"),
        ("sizes", f"hidden {config.hidden_size}, vocabulary {config.vocab_size}"),
        ("context", f"{config.max_position_embeddings} tokens"),
    ]
    if isinstance(config, Qwen4ExpConfig):
        rows.append(("experts", f"{config.num_experts_per_tok} of {config.num_experts}, and a shared one"))
        layers = ", ".join(map(str, config.ple_layer_ids)) or "none"
        rows.append(("n-gram memory", f"layers {layers}; n-grams up to {config.ngram_size} tokens"))
    return rows + [("note", note) for note in config.notes]


def _checkpoint_rows(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    tensors = checkpoint.tensors
    numbers = sum(math.prod(info.shape) for info in tensors.values())
    memory = sum(info.nbytes for name, info in tensors.items() if ".ngram_embedding." in name)
    dtypes = sorted({str(info.dtype).removeprefix("torch.") for info in tensors.values()})
    rows = [
        ("weights", f"{len(tensors)} tensors, {numbers:,} numbers, {_size(checkpoint.nbytes)}, {', '.join(dtypes)}")
    ]
    if memory:
        rows.append(("n-gram tables", f"{_size(memory)} of these"))
    return rows + [("note", note) for note in checkpoint.notes]


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
