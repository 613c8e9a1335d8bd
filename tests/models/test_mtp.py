"""The heads that draft, against a transcription in float64 that knows no cache, no chunks and no batches.

transformers has no such heads; what they compute is in the docstrings of models/mtp.py and layers/hyper_connections.py.
"""

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from deltagram import LLM
from deltagram.attention.cache import LayerCache, page_size
from deltagram.engine.engine import Engine
from deltagram.gdn.core import LayerState
from deltagram.gdn.state import allocate, ring_length
from deltagram.models.base import Model
from deltagram.models.config import Config, MoEConfig, Qwen4ExpConfig, read_config
from deltagram.models.load import load_model
from deltagram.step.drafts import Drafting, prepare_drafts
from deltagram.step.history import TokenHistory
from deltagram.step.plan import Bucket, Entry, Kind, StepPlan
from deltagram.step.sequences import SequenceTable, pack, prepare
from deltagram.testing.checkpoints import TINY_SHAPES, write_tiny_checkpoint

CPU = torch.device("cpu")
CONTEXT, ROWS = 192, 3
TOLERANCE = 1e-4  # relative to the largest logit
SHAPES = (
    "qwen3_5",
    "qwen3_5_tied",
    "qwen3_5_moe",
    "qwen3_5_moe_multimodal",
    "qwen3_next",
    "qwen3_next_dense_layers",
    "qwen4_exp",
    "qwen4_exp_dense",
    "qwen4_exp_packed",
    "qwen4_exp_multimodal",
)


class Transcription:
    """One request's pairs from the first on: `hidden` [P, H] or [P, streams, H] and the token after each."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.config = config
        self.w: dict[str, Tensor] = {}
        for file in folder.glob("*.safetensors"):
            for name, tensor in load_file(file).items():
                self.w[name.replace("model.language_model.", "model.")] = tensor.double()

    def __call__(self, hidden: Tensor, tokens: list[int]) -> tuple[Tensor, Tensor]:
        """Logits after each pair, and the hidden states handed on."""
        w, config = self.w, self.config
        words = self.norm(w["model.embed_tokens.weight"][tokens], "mtp.pre_fc_norm_embedding")
        head = w["model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"]
        if not isinstance(config, Qwen4ExpConfig):
            both = torch.cat((words, self.norm(hidden, "mtp.pre_fc_norm_hidden")), -1)
            x = both @ w["mtp.fc.weight"].T
            x = x + self.attention(self.norm(x, "mtp.layers.0.input_layernorm"))
            x = x + self.mlp(self.norm(x, "mtp.layers.0.post_attention_layernorm"))
            x = self.norm(x, "mtp.norm")
            return x @ head.T, x
        flat = self.norm(hidden.reshape(len(hidden), -1), "mtp.pre_fc_norm_hidden")
        streams = []
        for part in flat.split(config.hidden_size, -1):
            streams.append(part @ w["mtp.fc_hidden.weight"].T + words @ w["mtp.fc_embedding.weight"].T)
        for block, name in ((self.attention, "attn"), (self.mlp, "mlp")):
            x, inject = self.mix(streams, f"mtp.layers.0.{name}_hyper_connection")
            out = block(x)
            streams = [stream + out * inject[:, i : i + 1] for i, stream in enumerate(streams)]
        x, _ = self.mix(streams, "mtp.hyper_connection_mixer")
        return x @ head.T, torch.stack(streams, 1)

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps).sqrt() * (1 + self.w[f"{name}.weight"])

    def mix(self, streams: list[Tensor], at: str) -> tuple[Tensor, Tensor]:
        count, w = len(streams), self.w
        gains = (1 + w[f"{at}.hc_norm.weight"]).chunk(count)
        normed = [
            stream / (stream.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps).sqrt() * gain
            for stream, gain in zip(streams, gains, strict=True)
        ]
        flat = torch.cat(normed, -1)
        low = F.silu(flat @ w[f"{at}.input_mix_weight_down.weight"].T / count)
        gates = (low @ w[f"{at}.input_mix_weight_up.weight"].T).sigmoid().chunk(count, -1)
        x = sum((gate * part for gate, part in zip(gates, normed, strict=True)), torch.zeros(())) / count
        inject = w.get(f"{at}.block_inject_weight.weight", torch.zeros(count, flat.shape[1], dtype=torch.float64))
        return x, 2 * (flat @ inject.T / count).sigmoid()

    def mlp(self, x: Tensor) -> Tensor:
        at, config, w = "mtp.layers.0.mlp", self.config, self.w
        if not isinstance(config, MoEConfig):
            return self.gated(x, *(w[f"{at}.{name}_proj.weight"] for name in ("gate", "up", "down")))
        shared = self.gated(x, *(w[f"{at}.shared_expert.{name}_proj.weight"] for name in ("gate", "up", "down")))
        out = shared * (x @ w[f"{at}.shared_expert_gate.weight"].T).sigmoid()
        likely = (x @ w[f"{at}.gate.weight"].T).softmax(-1)
        for t, row in enumerate(likely):
            best = row.argsort(descending=True)[: config.num_experts_per_tok].tolist()
            total = sum(row[e] for e in best) if config.norm_topk_prob else 1.0
            for e in best:
                if f"{at}.experts.gate_up_proj" in w:
                    gate, up = w[f"{at}.experts.gate_up_proj"][e].chunk(2)
                    down = w[f"{at}.experts.down_proj"][e]
                else:
                    gate, up, down = (w[f"{at}.experts.{e}.{name}_proj.weight"] for name in ("gate", "up", "down"))
                out[t] += row[e] / total * self.gated(x[t], gate, up, down)
        return out

    @staticmethod
    def gated(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def turn(self, x: Tensor, positions: list[int]) -> Tensor:
        """x [T, heads, D], its first dimensions turned by the positions."""
        rope, half = self.config.rope, self.config.rotary_dim // 2
        assert rope.type == "default"
        angle = torch.tensor(positions, dtype=torch.float64)[:, None] * torch.tensor(
            [rope.theta ** (-i / half) for i in range(half)], dtype=torch.float64
        )
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)

    def attention(self, x: Tensor) -> Tensor:
        at, config, w = "mtp.layers.0.self_attn", self.config, self.w
        count, size = len(x), config.head_dim
        positions = list(range(count))
        query, gate = (x @ w[f"{at}.q_proj.weight"].T).view(count, -1, 2 * size).chunk(2, -1)
        key, value = ((x @ w[f"{at}.{name}_proj.weight"].T).view(count, -1, size) for name in "kv")
        query = self.turn(self.norm(query, f"{at}.q_norm"), positions)
        key = self.turn(self.norm(key, f"{at}.k_norm"), positions)
        group = config.num_attention_heads // config.num_key_value_heads
        seen = self.seen(x) if isinstance(config, Qwen4ExpConfig) else [list(range(t + 1)) for t in positions]
        out = torch.zeros(count, config.num_attention_heads, size, dtype=torch.float64)
        for t in positions:
            for head in range(config.num_attention_heads):
                keys, values = key[seen[t], head // group], value[seen[t], head // group]
                out[t, head] = (keys @ query[t, head] / math.sqrt(size)).softmax(0) @ values
        return (out * gate.sigmoid()).flatten(1) @ w[f"{at}.o_proj.weight"].T

    def seen(self, x: Tensor) -> list[list[int]]:
        """The positions that each token attends to, by the indexer."""
        assert isinstance(self.config, Qwen4ExpConfig)
        at, config = "mtp.layers.0.self_attn.indexer", self.config
        size, block, heads = config.indexer_head_dim, config.indexer_compress_ratio, config.indexer_n_heads
        projected = (x @ self.w[f"{at}.index_qk_proj.weight"].T).view(len(x), heads + 1, size)
        query = self.turn(self.norm(projected[:, :-1], f"{at}.q_layernorm"), list(range(len(x))))
        complete = len(x) // block
        means = projected[: complete * block, -1].view(complete, block, size).mean(1)
        keys = self.turn(self.norm(means, f"{at}.k_layernorm")[:, None], [b * block for b in range(complete)])[:, 0]
        seen = []
        for t in range(len(x)):
            known = (t + 1) // block
            scores = (query[t] @ keys[:known].T / math.sqrt(size)).relu().sum(0)
            best = scores.argsort(descending=True, stable=True)[: config.indexer_budget // block].tolist()
            chosen = [b * block + i for b in best for i in range(block)]
            seen.append(sorted([*chosen, *range(known * block, t + 1)]))
        return seen


@dataclass
class Request:
    """What the caller knows of a request: its tokens, and the model's hidden state at each but the last."""

    tokens: list[int]
    hidden: list[Tensor] = field(default_factory=list)


class Bench:
    """A head with a cache full of NaN, in scattered pages, and hidden states out of nowhere instead of a model's."""

    def __init__(self, folder: Path, seed: int = 0, device: torch.device = CPU) -> None:
        config = read_config(folder)
        self.config, self.device = config, device
        self.model = load_model(folder, config, CONTEXT, device, torch.float32, mtp=True)[0]
        assert self.model.mtp is not None
        self.head = self.model.mtp
        self.truth = Transcription(config, folder)
        self.generator = torch.Generator().manual_seed(seed)
        self.page_size = page_size(self.model.block_size)
        pages = -(-CONTEXT // self.page_size)
        order = torch.randperm(ROWS * pages + 2, generator=self.generator)
        self.page_table = torch.zeros(ROWS + 1, pages, dtype=torch.int32)
        self.page_table[:ROWS] = order[: ROWS * pages].view(ROWS, pages)
        self.page_table = self.page_table.to(device)
        self.history = TokenHistory(ROWS + 1, CONTEXT, device)
        give_caches(self.model, len(order), self.page_size, device)

    def random_hidden(self, count: int) -> Tensor:
        streams = (self.config.hc_count,) if isinstance(self.config, Qwen4ExpConfig) else ()
        return 3 * torch.randn(count, *streams, self.config.hidden_size, generator=self.generator).to(self.device)

    def table(self, entries: tuple[Entry, ...], padding: int = 0) -> SequenceTable:
        tokens = sum(entry.num_new for entry in entries) + padding
        mixed = any(entry.kind is Kind.PREFILL for entry in entries)
        bucket = Bucket(tokens, len(entries) + padding, mixed, max(entry.num_draft for entry in entries))
        packed = pack(StepPlan(0, bucket, entries), self.page_size, ROWS, ROWS)
        return prepare(torch.from_numpy(packed).to(self.device), bucket, self.history, self.page_table, self.page_size)

    def drafting(self, table: SequenceTable, *wanted: int) -> Drafting:
        """`wanted`: those of the first sequences; the others want none."""
        each = torch.zeros(table.bucket.sequences, dtype=torch.int32)
        each[: len(wanted)] = torch.tensor(wanted, dtype=torch.int32)
        return prepare_drafts(table, self.history, each.to(self.device), max([1, *wanted]))

    def commit(self, row: int, tokens: list[int]) -> None:
        """`tokens` come after what the history holds of `row`."""
        length = int(self.history.lengths[row])
        self.history.tokens[row, length : length + len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self.history.lengths[row] = length + len(tokens)

    def check(self, got: Tensor, wanted: Tensor, what: str) -> None:
        error = (got.cpu() - wanted).abs().max() / wanted.abs().max()
        assert error < TOLERANCE, f"{what}: {error:.1e}"


def give_caches(model: Model, pages: int, size: int, device: torch.device = CPU) -> None:
    def pool(*shape: int) -> Tensor:
        return torch.full((pages, *shape), math.nan, device=device)

    for layer in model.attention_layers:
        layer.cache = LayerCache(*(pool(size, layer.num_kv_heads, layer.head_dim) for _ in range(2)))
        if layer.indexer is not None and layer.indexer.budget < CONTEXT:
            width, block = layer.indexer.head_dim, layer.indexer.block_size
            layer.cache.index_keys, layer.cache.block_keys = pool(size, width), pool(size // block, width)


@pytest.fixture(params=SHAPES)
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Bench:
    return Bench(write_tiny_checkpoint(tmp_path, **TINY_SHAPES[request.param] | {"mtp": True, "shards": 3}))


@torch.inference_mode()
@pytest.mark.parametrize("remembered", [False, True])
def test_a_prompt_in_chunks(bench: Bench, remembered: bool) -> None:
    """Every pair's logits, and what is handed on, whole and of a few rows; no cache is read past what was written. The
    chunks before the last may be `remembered` alone."""
    tokens = torch.randint(0, 256, (131,), generator=bench.generator).tolist()
    hidden = bench.random_hidden(130)
    logits, handed_on = bench.truth(hidden.double(), tokens[1:])
    for cuts in ((0, 130), (0, 1, 2, 66, 130), (0, 63, 64, 127, 128, 129, 130)):
        give_caches(bench.model, len(bench.page_table) * 3 + 2, bench.page_size)
        bench.history.admit(1, tokens)
        for start, end in pairwise(cuts):
            entry = Entry(1, 0, 1, Kind.PREFILL, end - start, start, is_last_chunk=end == 130)
            table = bench.table((entry,), padding=3)
            token = bench.drafting(table).follower
            assert token.tolist() == tokens[start + 1 : end + 1] + [0] * 3
            padded = torch.cat((hidden[start:end], torch.full_like(hidden[:3], 7.0)))
            if remembered and end < 130:
                bench.head.remember(padded, token, table)
                continue
            got, handed = bench.head.draft(padded, token, table)
            bench.check(got[: end - start], logits[start:end], f"tokens {start} to {end}")
            bench.check(handed[: end - start], handed_on[start:end], f"hidden states {start} to {end}")
            some = torch.tensor([end - start - 1, 0])
            got, handed = bench.head.draft(padded, token, table, some)
            bench.check(got, logits[start + some], "logits of two rows")
            bench.check(handed, handed_on[start + some], "hidden states of two rows")


@torch.inference_mode()
@pytest.mark.parametrize("seed", range(2))
def test_drafts_of_mixed_steps(bench: Bench, seed: int) -> None:
    """Prompts, decode and verify steps side by side; up to four drafts, fed their own hidden states, of which some are
    accepted; a sequence that wants none, one that is not sampled, and padding."""
    chance = random.Random(seed)
    requests = {row: Request([chance.randrange(256) for _ in range(chance.choice((1, 5, 40, 66)))]) for row in range(3)}
    drafts: dict[int, list[int]] = {row: [] for row in requests}
    for row, request in requests.items():
        bench.history.admit(row, request.tokens)
    for _ in range(7):
        entries = []
        for row, request in requests.items():
            done, known = len(request.hidden), len(request.tokens)
            if known - done > 1 or not done:
                size = min(known - done, 64)
                last = done + size == known
                entries.append(Entry(row, 0, row, Kind.PREFILL, size, done, is_last_chunk=last))
            else:
                mine = drafts[row] = drafts[row][: chance.randrange(5)]
                bench.history.tokens[row, known : known + len(mine)] = torch.tensor(mine, dtype=torch.int32)
                kind = Kind.VERIFY if mine else Kind.DECODE
                entries.append(Entry(row, 0, row, kind, 1 + len(mine), done, len(mine)))
        entries.sort(key=lambda entry: entry.kind)
        table = bench.table(tuple(entries), padding=chance.randrange(3))
        hidden = bench.random_hidden(table.bucket.tokens)
        wanted = [0] * len(entries)
        for n, entry in enumerate(entries):
            request, begin = requests[entry.row], int(table.cu_tokens[n])
            kept = entry.num_new
            if entry.samples:
                accepted = chance.randrange(entry.num_draft + 1)
                kept -= entry.num_draft - accepted
                fresh = drafts[entry.row][:accepted] + [chance.randrange(256)]
                bench.commit(entry.row, fresh)
                request.tokens += fresh
                wanted[n] = chance.randrange(5)
            request.hidden += hidden[begin : begin + kept]

        drafting = bench.drafting(table, *wanted)
        assert len(drafting.tables) == max(0, max(wanted) - 1)
        got, handed = bench.head.draft(hidden, drafting.follower, table, drafting.first)
        drafts = {row: [] for row in requests}
        pairs = {row: list(request.hidden) for row, request in requests.items()}
        for nth in range(1, max(wanted) + 1):
            if nth > 1:
                got, handed = bench.head.draft(handed, got.argmax(-1), drafting.tables[nth - 2])
            for i, n in enumerate(drafting.order.tolist()):
                if n < len(entries) and wanted[n] >= nth:
                    row = entries[n].row
                    after = requests[row].tokens[1:] + drafts[row]
                    logits, handed_on = bench.truth(torch.stack(pairs[row]).double(), after)
                    bench.check(got[i], logits[-1], f"draft {nth} of request {row}")
                    bench.check(handed[i], handed_on[-1], f"hidden state {nth} of request {row}")
                    pairs[row].append(handed_on[-1].float())
                    drafts[row].append(int(got[i].argmax()))
    assert all(len(request.hidden) > 7 or len(request.tokens) > 7 for request in requests.values())


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen4_exp", "qwen4_exp_dense"])
@torch.inference_mode()
def test_captured_drafts(tmp_path: Path, shape: str) -> None:
    """Three drafts after a decode step, of one request and padding: replayed, they are the bits of the eager ones, and
    those of the transcription within rounding, although the step's place in the text moved since the capture."""
    device = torch.device("cuda")
    bench = Bench(write_tiny_checkpoint(tmp_path, **TINY_SHAPES[shape] | {"mtp": True}), device=device)
    tokens = torch.randint(0, 256, (98,), generator=bench.generator).tolist()
    hidden, states = bench.random_hidden(98), bench.random_hidden(3)
    bench.history.admit(1, tokens)
    table = bench.table((Entry(1, 0, 1, Kind.PREFILL, 90, 0, is_last_chunk=False),))
    bench.head.draft(hidden[:90], bench.drafting(table).follower, table)
    wanted = torch.tensor([3, 0, 0], dtype=torch.int32, device=device)
    packed = pack(StepPlan(0, Bucket(3, 3, False), (Entry(1, 0, 1, Kind.DECODE, 1, 90),)), bench.page_size, ROWS, ROWS)
    on_device = torch.from_numpy(packed).to(device)

    def drafts(lengths: Tensor) -> list[Tensor]:
        bench.history.lengths.copy_(lengths - 1)  # what they were when the step was prepared
        table = prepare(on_device, Bucket(3, 3, False), bench.history, bench.page_table, bench.page_size)
        bench.history.lengths.copy_(lengths)
        drafting = prepare_drafts(table, bench.history, wanted, 3)
        logits, handed = bench.head.draft(states, drafting.follower, table, drafting.first)
        results = [logits]
        for pass_table in drafting.tables:
            logits, handed = bench.head.draft(handed, logits.argmax(-1), pass_table)
            results.append(logits)
        return results

    lengths = bench.history.lengths.clone()
    lengths[1] = 92
    drafts(lengths)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = drafts(lengths)
    before: list[Tensor] = []
    for known in range(92, 99):
        lengths[1] = known
        states[0] = hidden[known - 2]
        graph.replay()
        replayed = [logits[0].clone() for logits in captured]
        eager = [logits[0] for logits in drafts(lengths)]
        assert all(torch.equal(one, other) for one, other in zip(replayed, eager, strict=True)), known
        before = eager
    pairs, after = list(hidden[:97].cpu().double()), tokens[1:98]
    for got in before:
        logits, handed_on = bench.truth(torch.stack(pairs), after)
        error = (got.cpu() - logits[-1]).abs().max() / logits[-1].abs().max()
        assert error < 1e-3, f"{error:.1e}"
        pairs.append(handed_on[-1])
        after = [*after, int(logits[-1].argmax())]


@pytest.mark.oracle
@pytest.mark.parametrize("shape", ["qwen3_5", "qwen3_next", "qwen3_5_moe", "qwen4_exp"])
@torch.inference_mode()
def test_a_head_gets_the_last_hidden_states(tmp_path: Path, shape: str) -> None:
    """Those that transformers' output head reads or, of residual streams, those before they are mixed for it."""
    import transformers

    folder = write_tiny_checkpoint(tmp_path, **TINY_SHAPES[shape] | {"mtp": True})
    (architecture,) = json.loads((folder / "config.json").read_text())["architectures"]
    theirs = getattr(transformers, architecture).from_pretrained(folder, dtype=torch.float32).eval()
    bench = Bench(folder)
    for layer in bench.model.linear_layers:
        shape_of_state = layer.num_value_heads, layer.value_dim, layer.key_dim
        layer.state = LayerState(
            allocate(ROWS, shape_of_state, torch.float32, CPU, True),
            allocate(ROWS, (ring_length(layer.conv_reach, 0), layer.channels), torch.float32, CPU, True),
        )
    for memory in bench.model.memory_layers:
        memory.history = allocate(ROWS, (ring_length(memory.reach, 0), memory.width), torch.float32, CPU, True)
    tokens = torch.randint(0, 256, (100,), generator=bench.generator).tolist()
    bench.history.admit(2, tokens)
    ours = bench.model.forward(bench.table((Entry(2, 0, 2, Kind.PREFILL, 100, 0),)), bench.history)
    held: list[Tensor] = []
    last = theirs.model.hyper_connection_mixer if shape == "qwen4_exp" else theirs.lm_head
    last.register_forward_pre_hook(lambda module, arguments: held.append(arguments[0][0]))
    logits = theirs(torch.tensor([tokens]), use_cache=False).logits[0]
    bench.check(ours, held[0].view_as(ours), "hidden states")
    bench.check(bench.model.logits(ours), logits, "logits")


def test_a_head_has_its_part_of_the_pages(tmp_path: Path) -> None:
    """One more attention layer, in pages of the same number and so of more bytes."""
    folder = write_tiny_checkpoint(tmp_path, mtp=True)
    llm = LLM(folder, device="cpu", dtype="float32", max_context=CONTEXT, cache_bytes=1 << 20)
    model = load_model(folder, llm.config, CONTEXT, CPU, torch.float32, mtp=True)[0]
    engine = Engine(model, llm.settings, llm.tokenizer)
    caches = [layer.cache for layer in model.attention_layers]
    assert len(caches) == len(llm.engine.model.attention_layers) + 1 == 2
    assert caches[0] is not None and caches[1] is not None and caches[1].block_keys is not None
    assert caches[0].keys.shape == caches[1].keys.shape and caches[0].keys.data_ptr() != caches[1].keys.data_ptr()
    assert len(caches[0].keys) == engine.stats.num_pages == llm.engine.stats.num_pages // 2


def change(folder: Path, edit: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def refusal(folder: Path, mtp: bool = True) -> str:
    with pytest.raises(ValueError) as caught:
        load_model(folder, read_config(folder), CONTEXT, CPU, torch.float32, mtp=mtp)
    return str(caught.value)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen4_exp"])
def test_weights_that_are_wrong_are_listed_in_one_message(tmp_path: Path, family: str) -> None:
    folder = write_tiny_checkpoint(tmp_path, family, mtp=True)
    mixer = "in_proj_qkvz" if family == "qwen3_next" else "in_proj_qkv"
    fc = "mtp.fc_hidden.weight" if family == "qwen4_exp" else "mtp.fc.weight"

    def spoil(tensors: dict[str, Tensor]) -> None:
        del tensors["mtp.pre_fc_norm_hidden.weight"], tensors[f"model.layers.0.linear_attn.{mixer}.weight"]
        tensors[fc] = torch.ones(3, 5)
        tensors["model.layers.1.linear_attn.out_proj.weight"] = torch.ones(2)
        tensors["mtp.layers.1.input_layernorm.weight"] = torch.ones(2)
        tensors["model.layers.0.mlp.odd.weight"] = torch.ones(2)

    change(folder, spoil)
    said = refusal(folder)
    assert "(2 missing, 2 surplus, 2 wrong)" in said and said.count("\n- ") == 6
    assert "missing: mtp.pre_fc_norm_hidden.weight" in said and f"{fc} in model.safetensors has shape [3, 5]" in said
    assert "surplus: mtp.layers.1.input_layernorm.weight" in said and f"{mixer}.weight [" in said
    without = refusal(folder, mtp=False)
    assert "(1 missing, 1 surplus, 1 wrong)" in without and "mtp." not in without


def test_a_head_that_is_not_there_cannot_be_asked_for(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "bare", "qwen3_next")
    assert "has no multi-token prediction weights (mtp.*)" in refusal(folder)
    folder = write_tiny_checkpoint(
        tmp_path / "linear",
        layer_types=["linear_attention"] * 4,
        **{f"indexer_{name}": None for name in ("n_heads", "kv_heads", "head_dim", "budget", "compress_ratio")},
    )
    change(folder, lambda tensors: tensors.update({"mtp.norm.weight": torch.ones(64)}))
    assert "has no indexer_n_heads in config.json" in refusal(folder)
    model, checkpoint = load_model(folder, read_config(folder), CONTEXT, CPU, torch.float32)
    assert model.mtp is None and "(1 tensors) are recognised and not loaded" in checkpoint.notes[0]


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_next", "qwen4_exp"])
def test_experts_load_packed_and_one_by_one(tmp_path: Path, family: str) -> None:
    """The model's and the head's, each of which may lie either way."""
    one, other = (
        write_tiny_checkpoint(tmp_path / str(packed), family, mtp=True, packed_experts=packed) for packed in (0, 1)
    )
    mixed = load_file(other / "model.safetensors")
    mixed |= {name: value for name, value in load_file(one / "model.safetensors").items() if name.startswith("mtp.")}
    mixed = {name: value for name, value in mixed.items() if not name.startswith("mtp.layers.0.mlp.experts.gate_up")}
    del mixed["mtp.layers.0.mlp.experts.down_proj"]
    results = []
    for folder in (one, other, tmp_path / "mixed"):
        if not folder.exists():
            write_tiny_checkpoint(folder, family, mtp=True)
            save_file(mixed, folder / "model.safetensors", {"format": "pt"})
        bench = Bench(folder)
        hidden = bench.random_hidden(9)
        bench.history.admit(0, list(range(10)))
        table = bench.table((Entry(0, 0, 0, Kind.PREFILL, 9, 0, is_last_chunk=False),))
        with torch.inference_mode():
            results.append(bench.head.draft(hidden, bench.drafting(table).follower, table)[0])
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
