"""The models against transformers, fp32 on the CPU: logits of every prompt length, greedy tokens, rotary variants."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deltagram import LLM, SamplingParams
from deltagram.kernels.select_blocks import select_blocks
from deltagram.llm import shipped_model
from deltagram.testing.checkpoints import END_OF_TEXT, END_OF_TURN, TINY_SHAPES, write_tiny_checkpoint

TOLERANCE = 1e-4  # relative to the largest logit
CLOSE = 1e-4  # two best logits this close may change places
SHIPPED = "the shipped model"
EVERY_LENGTH = ("qwen4_exp", "qwen3_5", "qwen3_5_moe", "qwen3_next")
# One token, the reach of both convolutions, chunks of 64 and their ends. Steps hold 64, 96 or 512 tokens.
LENGTHS = (1, 2, 3, 4, 5, 9, 10, 11, 31, 62, 63, 64, 65, 66, 96, 126, 127, 128, 129, 130)
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "factor": 4.0}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "factor": 3.0},
    "yarn": {**YARN, "original_max_position_embeddings": 32, "beta_fast": 8.0, "beta_slow": 2.0},
    "yarn, attention factor": {**YARN, "original_max_position_embeddings": 64, "attention_factor": 0.7},
    "yarn, not truncated": {**YARN, "original_max_position_embeddings": 64, "truncate": False, "factor": 2.5},
    "yarn, mscale": {**YARN, "original_max_position_embeddings": 64, "mscale": 0.8, "mscale_all_dim": 0.4},
    "all dimensions": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0},
}


LINEAR, FULL = "linear_attention", "full_attention"
ODD_SHAPES: dict[str, dict[str, Any]] = {
    "no attention": {"family": "qwen3_5", "layer_types": [LINEAR] * 4},
    "attention alone": {"family": "qwen3_5", "layer_types": [FULL] * 4, "num_key_value_heads": 1},
    "convolution over two": {"family": "qwen3_5", "linear_conv_kernel_dim": 2},
    "convolution over one": {"family": "qwen3_5", "linear_conv_kernel_dim": 1},
    "memory's convolution over one": {"family": "qwen4_exp", "ple_conv_kernel_size": 1},
    "blocks of three": {
        "family": "qwen4_exp",
        "indexer_compress_ratio": 3,
        "indexer_budget": 15,
    },  # pages of 192 tokens
    "blocks of one": {"family": "qwen4_exp", "indexer_compress_ratio": 1},
    "bigrams": {"family": "qwen4_exp", "ngram_size": 2, "ple_conv_kernel_size": 2},
    "5-grams on three layers": {
        "family": "qwen4_exp",
        "ngram_size": 5,
        "heads_per_ngram": 1,
        "ple_layer_ids": [1, 2, 3],
    },
    "sixteen experts": {"family": "qwen4_exp", "num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": False},
    "one expert": {"family": "qwen4_exp", "num_experts": 1, "num_experts_per_tok": 1, "output_gate_type": "sigmoid"},
}


def oracle(folder: Path) -> Any:
    """The model of transformers."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    (architecture,) = json.loads((folder / "config.json").read_text())["architectures"]
    model_class = getattr(transformers, architecture.replace("ForConditionalGeneration", "ForCausalLM"))
    return model_class.from_pretrained(folder, dtype=torch.float32).eval()


def prompt_ids(length: int, vocab_size: int, seed: int) -> list[int]:
    """Random tokens, with ends of text among them: they bound n-grams."""
    ids = torch.randint(0, vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    for i in range(6, length, 23):
        ids[i] = END_OF_TURN if vocab_size < 1000 else 0
    for i in range(17, length, 50):
        ids[i] = END_OF_TEXT
    return ids


@dataclass
class Case:
    name: str
    folder: Path
    theirs: Any
    prompt: list[int]  # 130 tokens
    logits: Tensor  # transformers' [130, vocab]

    def engine(self, max_num_tokens: int) -> LLM:
        return LLM(self.folder, device="cpu", dtype="float32", max_num_tokens=max_num_tokens, max_num_sequences=1)


def make_case(name: str, folder: Path) -> Case:
    theirs = oracle(folder)
    prompt = prompt_ids(130, theirs.config.vocab_size, seed=1)
    with torch.no_grad():
        return Case(name, folder, theirs, prompt, theirs(torch.tensor([prompt]), use_cache=False).logits[0])


@pytest.fixture(scope="module", params=[*TINY_SHAPES, SHIPPED])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    if request.param == SHIPPED:
        folder = shipped_model()
    else:
        folder = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), **TINY_SHAPES[request.param])
    yield make_case(request.param, folder)


def check_logits(case: Case, llm: LLM, lengths: tuple[int, ...] | range) -> None:
    for length in lengths:
        got = llm.prompt_logits(case.prompt[:length])
        assert got.shape == (length, case.logits.shape[1]) and got.dtype == torch.float32
        error = (got - case.logits[:length]).abs().max() / case.logits[:length].abs().max()
        assert error < TOLERANCE, f"{length} tokens in steps of {llm.settings.max_num_tokens}: {error:.1e}"
    llm.engine.scheduler.check_empty()


@pytest.mark.oracle
def test_logits_of_every_prompt_length(case: Case) -> None:
    for max_num_tokens in (64, 96, 512):
        every = case.name in EVERY_LENGTH and max_num_tokens == 64
        check_logits(case, case.engine(max_num_tokens), range(1, 131) if every else LENGTHS)


@pytest.mark.oracle
def test_a_long_prompt(case: Case) -> None:
    """Over a hundred blocks for an indexer to choose from, and eight pages."""
    prompt = prompt_ids(500, case.logits.shape[1], seed=2)
    with torch.no_grad():
        wanted = case.theirs(torch.tensor([prompt])).logits[0]
    for max_num_tokens in (96, 512):
        error = (case.engine(max_num_tokens).prompt_logits(prompt) - wanted).abs().max() / wanted.abs().max()
        assert error < TOLERANCE


@pytest.mark.oracle
@pytest.mark.parametrize("length", [1, 63, 70])
def test_greedy_tokens(case: Case, length: int) -> None:
    """One pass of theirs over the prompt and our tokens says what it would have chosen after each."""
    prompt = case.prompt[:length]
    params = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)
    (completion,) = case.engine(64).generate(prompt, params)
    tokens = torch.tensor(completion.outputs[0].token_ids)
    assert len(tokens) == 64
    with torch.no_grad():
        logits = case.theirs(torch.tensor([prompt + tokens.tolist()])).logits[0, length - 1 : -1]
    best = logits.topk(2).values
    close = best[:, 0] - best[:, 1] < CLOSE
    assert close.sum() <= 1 and ((logits.argmax(-1) == tokens) | close).all()


@pytest.mark.oracle
def test_greedy_tokens_against_their_own_decoding(case: Case) -> None:
    """Theirs decodes with its caches; the two may part only where its two best logits are close."""
    prompt = case.prompt[:20]
    params = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)
    ours = torch.tensor(case.engine(512).generate(prompt, params)[0].outputs[0].token_ids)
    ids = torch.tensor([prompt])
    out = case.theirs.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=64, eos_token_id=None, pad_token_id=0,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    theirs, best = out.sequences[0, len(prompt) :], torch.cat(out.logits).topk(2).values
    assert len(theirs) == 64
    differing = (ours != theirs).nonzero().flatten()
    if len(differing):
        first = differing[0]
        assert best[first, 0] - best[first, 1] < CLOSE, f"token {first} differs"


@pytest.mark.oracle
@pytest.mark.parametrize("family", ["qwen4_exp", "qwen3_5"])
@pytest.mark.parametrize("rope", ROPES)
def test_rotary_variants(tmp_path: Path, rope: str, family: str) -> None:
    folder = write_tiny_checkpoint(tmp_path, family, rope_parameters=ROPES[rope])
    case = make_case(rope, folder)
    check_logits(case, case.engine(64), (3, 130))


@pytest.mark.oracle
@pytest.mark.parametrize("shape", ODD_SHAPES)
def test_odd_shapes(tmp_path: Path, shape: str) -> None:
    case = make_case(shape, write_tiny_checkpoint(tmp_path, **ODD_SHAPES[shape]))
    for max_num_tokens in (64, 512):
        check_logits(case, case.engine(max_num_tokens), (1, 2, 65, 130))


@pytest.mark.parametrize("budget", [8, 16])
def test_of_equal_scores_the_lower_block_is_chosen(budget: int) -> None:
    """transformers leaves this to topk, so the logits above cannot say. 6 complete blocks of 4 tokens and a tail."""
    keys = torch.zeros(1, 16, 2)
    keys[0, :6] = torch.tensor([[1.0, 0], [2, 0], [1, 0], [-1, 0], [2, 0], [1, 0]])
    q = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])  # the second query scores every block 0
    one = torch.tensor([[0]], dtype=torch.int32)
    table = {"page_table": one, "row": one[0], "cu_tokens": torch.tensor([0, 2], dtype=torch.int32)}
    position = torch.tensor([24, 25], dtype=torch.int32)
    length = torch.tensor([26], dtype=torch.int32)
    got = select_blocks(q, keys, **table, length=length, position=position, block_size=4, top_k=budget // 4)
    assert got.tolist() == [[1, 4, 0, 2][: budget // 4], [0, 1, 2, 3][: budget // 4]]
