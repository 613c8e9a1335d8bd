"""ngram_hash against Python's integers one token at a time, transformers and nemo-automodel, in any step."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltagram.kernels.ngram_hash import ngram_hash
from deltagram.ngram.spec import HashConstants, HashSpec, engram_specs, longcat_spec, qwen4_exp_spec

VOCAB, EOS = 200, 7
CPU = torch.device("cpu")


def families() -> dict[str, list[HashSpec]]:
    token_map = [token // 2 for token in range(VOCAB)]
    return {
        "engram": engram_specs(
            token_map=token_map,
            compressed_vocab_size=VOCAB // 2,
            pad_token=2,
            max_order=4,
            heads=3,
            base=1000,
            layers=[1, 14],
            num_rows=[20000, 20000],
        ),
        "qwen4_exp": [
            qwen4_exp_spec(
                vocab_size=VOCAB, max_order=3, heads=2, base=1000, divisor=8, seed=5, end_of_sequence=EOS, layer=layer
            )
            for layer in range(2)
        ],
        "longcat": [
            longcat_spec(
                vocab_size=VOCAB, max_order=4, heads=2, ratio=7, end_of_sequence=EOS, ignored=[range(4), range(50, 53)]
            )
        ],
    }


def one_by_one(spec: HashSpec, tokens: list[int], dead: list[bool]) -> list[list[int]]:
    """The ids of a text, straight from the rules, in Python's unbounded integers."""
    heads = spec.num_columns // (spec.max_order - 1)
    rows = []
    for t in range(len(tokens)):
        lookback, stopped = [], False
        for s in range(spec.max_order):
            stopped = stopped or t - s < 0 or dead[t - s] or (s > 0 and tokens[t - s] == spec.end_of_sequence)
            mapped = -1
            if not stopped:
                mapped = tokens[t - s] if spec.token_map is None else spec.token_map[tokens[t - s]]
                stopped = mapped < 0
            lookback.append(spec.fill if stopped else mapped)
        row = []
        for column, (modulus, offset) in enumerate(zip(spec.moduli, spec.offsets, strict=True)):
            mixed = 0
            for s in range(2 + column // heads):
                product = lookback[s] * spec.multipliers[s]
                mixed = mixed + product if spec.polynomial else mixed ^ product
            row.append(mixed % modulus + offset)
        rows.append(row)
    return rows


def hashed(specs: list[HashSpec], history, sequence, row, position, dead=None, impl=None):
    constants = HashConstants.of(specs, history.device)
    ints = [torch.tensor(values, dtype=torch.int32, device=history.device) for values in (sequence, row, position)]
    return ngram_hash(
        history, *ints, constants.multipliers, constants.moduli, constants.offsets, constants.fill,
        constants.end_of_sequence, constants.polynomial, constants.token_map, dead, impl,
    )  # fmt: skip


tokens = st.lists(st.sampled_from([0, 1, 2, 3, EOS, 51, 60, 61, 198, 199]), min_size=1, max_size=12)


@pytest.mark.parametrize("family", families())
@settings(max_examples=25, deadline=None)
@given(text=tokens, marks=st.lists(st.booleans(), min_size=12, max_size=12), cut=st.integers(0, 12))
def test_equals_the_rules_in_any_chunks(family, text, marks, cut):
    """Two chunks, the second among another request's tokens and padding: the ids of the whole text, token by token."""
    specs = families()[family]
    dead = torch.zeros(3, 16, dtype=torch.bool)
    dead[2, : len(text)] = torch.tensor(marks[: len(text)])
    # What is not the text's is poison: past the text's end, in the padding row, in the other request.
    history = torch.full((3, 16), 2**31 - 1, dtype=torch.int32)
    history[2, : len(text)] = torch.tensor(text)
    history[0, :2] = 5
    cut = min(cut, len(text))
    want = [one_by_one(spec, text, marks) for spec in specs]
    first = hashed(specs, history, [0] * cut + [-1] * 2, [2], [*range(cut), 0, 0], dead)
    assert first[:, :cut].tolist() == [rows[:cut] for rows in want]
    assert (first[:, cut:] == -1).all()
    rest = len(text) - cut
    both = hashed(specs, history, [0] * 2 + [1] * rest + [-1], [0, 2], [0, 1, *range(cut, len(text)), 0], dead)
    assert both[:, 2 : 2 + rest].tolist() == [rows[cut:] for rows in want]


@pytest.mark.parametrize("family", families())
def test_ids_stay_in_their_columns(family):
    specs = families()[family]
    history = torch.randint(0, VOCAB, (1, 500), dtype=torch.int32)
    ids = hashed(specs, history, [0] * 500, [0], range(500))
    for layer, spec in enumerate(specs):
        low = torch.tensor(spec.offsets)
        assert ((ids[layer] >= low) & (ids[layer] < low + torch.tensor(spec.moduli))).all()


def test_a_rejected_draft_leaves_nothing_behind():
    """Ids come from the history alone: hash a draft, overwrite it, and the next step is as if it had never been."""
    specs = families()["qwen4_exp"]
    history = torch.zeros(1, 16, dtype=torch.int32)
    history[0, :6] = torch.tensor([9, 8, 5, 100, 101, 102])  # three drafted tokens
    hashed(specs, history, [0] * 6, [0], range(6))
    history[0, 3:5] = torch.tensor([30, 31])
    want = one_by_one(specs[0], [9, 8, 5, 30, 31], [False] * 5)
    assert hashed(specs, history, [0] * 2, [0], [3, 4])[0].tolist() == want[3:]


@pytest.mark.oracle
def test_equals_transformers():
    from transformers import Qwen4ExpTextConfig
    from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextNGramEmbedding

    config = Qwen4ExpTextConfig(
        vocab_size=VOCAB, ngram_size=3, heads_per_ngram=2, ngram_vocab_size_base=1000, eos_token_id=[EOS, 9],
        make_ngram_vocab_size_divisible_by=8, seed=5, ple_layer_ids=[1, 2],
    )  # fmt: skip
    text = torch.randint(0, VOCAB, (1, 300))
    text[torch.rand(1, 300) < 0.2] = EOS
    specs = families()["qwen4_exp"]
    ids = hashed(specs, text.int(), [0] * 300, [0], range(300))
    for layer, spec in enumerate(specs):
        theirs = Qwen4ExpTextNGramEmbedding(config, 4, 0, layer)
        assert theirs.layer_multipliers.tolist() == list(spec.multipliers)
        theirs.ngram_embedding = torch.nn.Embedding.from_pretrained(torch.arange(spec.num_rows)[:, None].double())
        assert torch.equal(ids[layer], theirs(text, None)[0].long())


@pytest.mark.oracle
def test_equals_nemo_automodel():
    engram = pytest.importorskip("nemo_automodel.components.models.deepseek_v41.engram")
    specs = families()["engram"]
    theirs = engram.DeepseekV41NgramHash.__new__(engram.DeepseekV41NgramHash)
    torch.nn.Module.__init__(theirs)
    theirs.max_ngram_size, theirs.n_heads, theirs.pad_id = 4, 3, specs[0].fill
    for name in ("primes", "offsets", "multipliers"):
        ours = [getattr(spec, {"primes": "moduli"}.get(name, name)) for spec in specs]
        setattr(theirs, name, torch.tensor(ours))
    theirs.token_map = torch.tensor(specs[0].token_map)
    text, live = torch.randint(0, VOCAB, (1, 300)), torch.rand(1, 300) > 0.2
    want = theirs(text, token_mask=live)[0]  # [T, layers, columns]
    got = hashed(specs, text.int(), [0] * 300, [0], range(300), dead=~live)
    assert torch.equal(got, want.transpose(0, 1))


def remainders(numbers: list[int], moduli: list[int], impl: str) -> list[list[int]]:
    """The remainders of numbers under 2^62 by the op: a polynomial hash of two tokens, 2^31 * a + b."""
    pairs = torch.tensor([[number & 0x7FFFFFFF, number >> 31] for number in numbers], dtype=torch.int32)
    multipliers = torch.tensor([[[1] * len(moduli), [1 << 31] * len(moduli)]])
    places = torch.zeros(len(numbers), dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    ids = []
    for low, high in pairs.tolist():
        history = torch.tensor([[high, low]], dtype=torch.int32)
        one = torch.tensor([1], dtype=torch.int32)
        args = history, places[0][:1], places[1], one, multipliers, torch.tensor([moduli])
        ids += ngram_hash(*args, torch.zeros(1, len(moduli), dtype=torch.int64), 0, polynomial=True, impl=impl)[0]
    return torch.stack(ids).tolist()


@pytest.mark.parametrize("impl", ["compiled", "reference"])
@pytest.mark.parametrize("least", [1 << 13, 6, 1 << 40])
def test_remainders_are_exact(impl, least):
    """Where a quotient by fp64 numbers is off the most: multiples of a modulus and their neighbours, up to 2^62; and
    moduli too small or too large for it."""
    moduli = [least + step for step in (0, 1, 3, 57, 1001)] + [20000003, 15999999, (1 << 31) - 1, (1 << 31) - 3]
    generator = random.Random(0)
    numbers = [0, 1, (1 << 62) - 1, (1 << 62) - 2, 1 << 53, (1 << 53) + 1]
    for modulus in moduli:
        largest = ((1 << 62) - 2) // modulus
        for factor in (1, largest, largest - 1, *(generator.randrange(1, largest) for _ in range(12))):
            numbers += [factor * modulus + step for step in (-1, 0, 1)]
    want = [[number % modulus for modulus in moduli] for number in numbers]
    assert remainders(numbers, moduli, impl) == want


@pytest.mark.parametrize("num_columns", [1, 3, 8, 11])
def test_columns_beyond_a_vector_are_left_alone(num_columns):
    """The compiled body writes eight columns at a time: of each row, and of the last one, no more than there are."""
    moduli = torch.arange(10007, 10007 + num_columns)[None]
    multipliers = torch.randint(1 << 20, (1, 2, num_columns))
    tokens, zeros = torch.randint(200, (1, 50), dtype=torch.int32), torch.zeros(50, dtype=torch.int32)
    args = tokens, zeros, zeros[:1], torch.arange(50, dtype=torch.int32), multipliers, moduli, moduli * 0, 3
    for polynomial in (False, True):
        want = ngram_hash(*args, polynomial=polynomial, impl="reference")
        assert torch.equal(ngram_hash(*args, polynomial=polynomial), want)


def test_the_kernel_needs_triton_or_a_gpu_and_says_so():
    with pytest.raises(ValueError, match="impl must be"):
        hashed(families()["longcat"], torch.zeros(1, 4, dtype=torch.int32), [0], [0], [0], impl="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("family", families())
@pytest.mark.parametrize("num_tokens", [1, 7, 4096])
def test_kernel_equals_reference(family, num_tokens):
    specs = families()[family]
    history = torch.randint(0, VOCAB, (9, 4096), dtype=torch.int32)
    history[torch.rand(9, 4096) < 0.1] = EOS
    dead = torch.rand(9, 4096) < 0.05
    sequence = torch.randint(-1, 4, (num_tokens,)).tolist()
    position = torch.randint(0, 4096, (num_tokens,)).tolist()
    args = sequence, [8, 0, 3, 5], position
    want = hashed(specs, history, *args, dead)
    assert torch.equal(hashed(specs, history.cuda(), *args, dead.cuda()).cpu(), want)
    history[7] = 2**31 - 1  # no sequence's row: poison there is not read
    assert torch.equal(hashed(specs, history.cuda(), *args, dead.cuda()).cpu(), want)
