"""Write a trained demo model as a Hugging Face checkpoint folder, and read such weights back."""

import json
import os
from pathlib import Path

import torch
from demo_model import DemoModel
from safetensors.torch import load_file, save
from torch import Tensor

SHARD_BYTES = 15 * 2**20


def checkpoint_tensors(model: DemoModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """Name to tensor as checkpoints have them: one tensor per expert and matrix, n-gram tables in equal parts."""
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        value = value.detach().cpu()
        if value.is_floating_point():
            value = value.to(dtype)
        if name.endswith("ngram_embedding.weight"):
            parts = value.chunk(model.config.split_ngram_parts)
            tensors |= {f"{name.removesuffix('weight')}shard_{i}.weight": part for i, part in enumerate(parts)}
        else:
            tensors |= expert_tensors(name, value)
    return {name: value.contiguous().clone() for name, value in tensors.items()}


def expert_tensors(name: str, value: Tensor) -> dict[str, Tensor]:
    """A tensor of all experts, one an expert and matrix; any other as it is."""
    if name.endswith("experts.gate_up_proj"):
        tensors = {}
        for expert, (gate, up) in enumerate(part.chunk(2) for part in value):
            stem = f"{name.removesuffix('gate_up_proj')}{expert}"
            tensors |= {f"{stem}.gate_proj.weight": gate, f"{stem}.up_proj.weight": up}
        return tensors
    if name.endswith("experts.down_proj"):
        return {f"{name.removesuffix('down_proj')}{expert}.down_proj.weight": part for expert, part in enumerate(value)}
    return {name: value}


def load_checkpoint(model: DemoModel, folder: Path) -> None:
    """Load what `export` wrote. Raises on any missing or surplus tensor."""
    tensors = {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}
    state = {}
    for name in model.state_dict():
        stem = name.rsplit(".", 1)[0]
        if name.endswith("experts.gate_up_proj"):
            experts = [
                torch.cat([tensors.pop(f"{stem}.{expert}.{half}_proj.weight") for half in ("gate", "up")])
                for expert in range(model.config.num_experts)
            ]
            state[name] = torch.stack(experts)
        elif name.endswith("experts.down_proj"):
            experts = [tensors.pop(f"{stem}.{expert}.down_proj.weight") for expert in range(model.config.num_experts)]
            state[name] = torch.stack(experts)
        elif name.endswith("ngram_embedding.weight"):
            parts = range(model.config.split_ngram_parts)
            state[name] = torch.cat([tensors.pop(f"{stem}.shard_{part}.weight") for part in parts])
        else:
            state[name] = tensors.pop(name)
    if tensors:
        raise ValueError(f"surplus tensors in {folder}: {sorted(tensors)}")
    model.load_state_dict(state)


def write_safely(path: Path, content: bytes) -> None:
    """Write beside `path` and rename, so that a reader never sees half a file."""
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_bytes(content)
    os.replace(temporary, path)


def export(model: DemoModel, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """config.json, generation_config.json, weight shards of at most 15 MiB and their index, into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = checkpoint_tensors(model, dtype)
    shards: list[dict[str, Tensor]] = [{}]
    for name, value in tensors.items():
        if sum(x.nbytes for x in shards[-1].values()) + value.nbytes > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = value
    files = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    for file, shard in zip(files, shards, strict=True):
        write_safely(folder / file, save(shard, metadata={"format": "pt"}))
    generation = {
        "bos_token_id": None,
        "eos_token_id": [0, 2],
        "pad_token_id": 0,
        "do_sample": True,
        "temperature": 0.8,
        "top_p": 0.95,
    }
    documents = {
        "model.safetensors.index.json": {
            "metadata": {"total_size": sum(x.nbytes for x in tensors.values())},
            "weight_map": {name: file for file, shard in zip(files, shards, strict=True) for name in shard},
        },
        "config.json": model.config.to_json(str(dtype).removeprefix("torch.")),
        "generation_config.json": generation,
    }
    for file, content in documents.items():
        write_safely(folder / file, (json.dumps(content, indent=2) + "\n").encode())
