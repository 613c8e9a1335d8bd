"""Rows of split tables: every exchange, placement and way to split gives each rank the bits of a local lookup."""

import itertools
import random
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deltagram.kernels.row_decode import row_decode
from deltagram.kernels.row_lookup import row_lookup
from deltagram.ngram.exchange_choice import KINDS, Setup, make_exchange
from deltagram.ngram.sharding import Split, SplitTables, slice_segments, split
from deltagram.ngram.spec import HashSpec, qwen4_exp_spec
from deltagram.parallel.groups import Group
from deltagram.testing.ngram import FORMATS, SCALE, filled_store, random_table, same_bits
from deltagram.testing.ranks import Ranks

EXCHANGES = list(KINDS)
PLACEMENTS = ("device", "host", "shared", "disk", "cached:2KiB:host", "cached:1KiB:disk")
MAX_TOKENS = 8


def specs(heads: int) -> list[HashSpec]:
    """Two layers of 2 * heads columns."""
    fields = {"vocab_size": 100, "max_order": 3, "base": 30, "divisor": 8, "seed": 1, "end_of_sequence": 1}
    return [qwen4_exp_spec(**fields, heads=heads, layer=layer) for layer in range(2)]


def tables(group: Group, heads: int, way: str, form: str, placement: str, dtype, folder: Path) -> SplitTables:
    splits, stores = [], []
    for layer, spec in enumerate(specs(heads)):
        cut = split(spec, group.size, way)
        rows = cut.rows(group.rank)
        mine = random_table(FORMATS[form], spec.num_rows, layer)[rows.start : rows.stop]
        where = folder / f"{group.size}-{group.rank}-{heads}-{way}-{form}-{placement}-{layer}".replace(":", "-")
        where.mkdir(parents=True, exist_ok=True)
        splits.append(cut)
        stores.append(filled_store(placement, FORMATS[form], mine, where, group.device))
    return SplitTables(tuple(splits), tuple(stores), group.rank, dtype)


def random_ids(heads: int, count: int, seed: int) -> Tensor:
    """int64 [layers, count, columns]; one in eight is missing."""
    generator = torch.Generator().manual_seed(seed)
    layers = []
    for spec in specs(heads):
        drawn = torch.rand(count, spec.num_columns, generator=generator, dtype=torch.float64)
        ids = (drawn * torch.tensor(spec.moduli)).long() + torch.tensor(spec.offsets)
        layers.append(torch.where(torch.rand(ids.shape, generator=generator) < 0.125, -1, ids))
    return torch.stack(layers)


def expected(heads: int, form: str, dtype, ids: Tensor) -> list[Tensor]:
    """Of whole tables, in one process."""
    found = []
    for layer, spec in enumerate(specs(heads)):
        fmt, table = FORMATS[form], random_table(FORMATS[form], spec.num_rows, layer)
        scale = torch.tensor([SCALE]) if fmt.table_scale else None
        if dtype is None:
            found.append(row_lookup(table, ids[layer]))
        else:
            found.append(row_decode(table, ids[layer], fmt.values, fmt.dim, dtype, fmt.group, scale))
    return found


def agrees(exchange: str, got: Tensor, wanted: Tensor) -> bool:
    """Bit for bit; but a Lamport gather brings +0.0 for -0.0."""
    return same_bits(got, wanted + 0.0 if exchange == "lamport" else wanted)


def check_exchanges(group: Group, heads: int, folder: Path) -> tuple[list[str], list[str]]:
    """On each rank, of every exchange x placement x split x who has which tokens x format x dtype: those that were
    tried, and what went wrong."""
    tried, faults = [], []
    chain = group.communicator("chain")
    ways = ["heads", "rows"] if 2 * heads % group.size == 0 else ["auto"]
    forms = itertools.cycle([("ue8m0", None), ("one scale", torch.bfloat16), ("bf16", torch.float32), ("fp32", None)])
    for exchange, placement, way, same in itertools.product(EXCHANGES, PLACEMENTS, ways, (False, True)):
        form, dtype = next(forms)
        split_tables = tables(group, heads, way, form, placement, dtype, folder)
        setup = Setup(split_tables, group, chain, MAX_TOKENS, same)
        if any(group.gather_objects(KINDS[exchange].problem(setup))):
            continue
        made, _ = make_exchange(exchange, setup)
        tried.append(f"{exchange} {placement} {way} {'same' if same else 'different'} tokens")
        for round, slot in enumerate((MAX_TOKENS, 3, 1)):
            count = slot if same else (slot + group.rank + round) % (slot + 1)  # from none to all of the slot
            ids = random_ids(heads, count, round if same else round * group.size + group.rank)
            rows = made.exchange(ids.to(group.device), slot)
            for layer, wanted in enumerate(expected(heads, form, dtype, ids)):
                given = torch.full_like(wanted, 1, device=group.device)
                found = rows.take(layer), rows.take(layer, given), given
                if not all(agrees(exchange, each.cpu(), wanted) for each in found):
                    faults.append(f"{tried[-1]} {form} {dtype} slot={slot} layer={layer}")
    return tried, faults


def delayed(group: Group, exchange: str, rounds: int, folder: Path) -> tuple[int, int]:
    """On each rank: exchanges run, with pauses at random, and those that brought a wrong row."""
    same = exchange == "lamport"
    heads, form, dtype = 4, "bf16", torch.float32 if same else None
    split_tables = tables(group, heads, "heads", form, "device", dtype, folder)
    made, _ = make_exchange(exchange, Setup(split_tables, group, group.communicator("chain"), 2, same))
    own, shared, wrong = random.Random(group.rank), random.Random(7), 0
    seed = 0 if same else 100 * group.rank
    batches = [random_ids(heads, count, seed + i) for i, count in enumerate((2, 1, 0, 2, 2, 1))]
    answers = [expected(heads, form, dtype, ids) for ids in batches]
    for i in range(rounds):
        if own.random() < 0.02:
            time.sleep(own.random() ** 4 / 50)  # most of them short; up to 20 ms
        which = (shared if same else own).randrange(len(batches))
        rows = made.exchange(batches[which].to(group.device), 2)
        if own.random() < 0.3:
            time.sleep(0)
        wrong += not agrees(exchange, rows.take(i % 2).cpu(), answers[which][i % 2])
    return rounds, wrong


ON_CARDS = [(2, "cuda:0"), (4, "cuda:0"), (2, "cuda")]  # on one card, or on one each


@pytest.fixture(
    scope="module", params=[(2, "cpu"), (4, "cpu"), *(pytest.param(on, marks=pytest.mark.gpu) for on in ON_CARDS)]
)
def ranks(request):
    size, device = request.param
    if device == "cuda" and torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} CUDA devices")
    with Ranks(size, device) as group:
        yield group


@pytest.mark.parametrize("heads", [4, 3])
def test_every_exchange_placement_and_split_gives_the_bits_of_a_local_lookup(ranks, heads, tmp_path):
    """With 3 heads, 6 columns: four ranks split by rows."""
    found = ranks.run(check_exchanges, heads, tmp_path)
    tried = found[0][0]
    assert found == [(tried, [])] * len(ranks.pipes)
    ways = ["heads", "rows"] if 2 * heads % len(ranks.pipes) == 0 else ["auto"]
    kernels_read = [p for p in PLACEMENTS if p in ("device", "host", "shared")]
    for placement, way, tokens in itertools.product(PLACEMENTS, ways, ("same", "different")):
        assert f"collective {placement} {way} {tokens} tokens" in tried
        assert (f"peer {placement} {way} {tokens} tokens" in tried) == (placement in kernels_read and way == "heads")
    assert any(each.startswith("lamport") for each in tried) == (ways != ["auto"])


@pytest.mark.parametrize(("exchange", "rounds"), [("peer", 10_000), ("lamport", 1000), ("collective", 250)])
def test_exchanges_under_random_delays(ranks, exchange, rounds, tmp_path):
    """Ten thousand where ranks wait for each other in memory; fewer where a library's collectives move the rows."""
    assert ranks.run(delayed, exchange, rounds, tmp_path) == [(rounds, 0)] * len(ranks.pipes)


def test_a_split_gives_each_row_one_owner():
    for spec, ranks, way in itertools.product(specs(4), (1, 2, 3, 4, 8, 16), ("auto", "rows")):
        cut = split(spec, ranks, way)
        assert cut.by_heads == (way == "auto" and 8 % ranks == 0)
        assert [row for rank in range(ranks) for row in cut.rows(rank)] == list(range(spec.num_rows))
        ids = random_ids(4, 50, 0)[specs(4).index(spec)]
        owner = cut.owner(ids)
        for rank in range(ranks):
            local = cut.local(ids[:, cut.columns(rank)], rank)
            mine = (owner == rank)[:, cut.columns(rank)] & (ids[:, cut.columns(rank)] >= 0)
            assert torch.equal(local >= 0, mine)
            assert torch.equal(local[mine] + cut.rows(rank).start, ids[:, cut.columns(rank)][mine])


def test_what_cannot_be_split_is_refused():
    spec = specs(4)[0]
    with pytest.raises(ValueError, match="ngram_split is 'columns'; expected auto, heads, rows"):
        split(spec, 2, "columns")
    with pytest.raises(ValueError, match="8 columns do not divide by 3 ranks"):
        split(spec, 3, "heads")
    with pytest.raises(ValueError, match=r"a table of \d+ rows over 1000 ranks; expected a row each"):
        split(spec, 1000)


def test_segments_of_a_rank_cover_its_rows(tmp_path):
    form = FORMATS["ue8m0"]
    table = random_table(form, 40)
    whole = filled_store("disk", form, table, tmp_path, torch.device("cpu"))
    segments = [part for _, _, _, parts in whole._columns for part in parts]
    for rows in (range(0, 13), range(13, 15), range(5, 40), range(39, 40)):
        found = slice_segments(segments, rows)
        assert {part.at: 0 for part in found} == {0: 0, 64: 0}
        for at in (0, 64):
            assert sum(part.count for part in found if part.at == at) == len(rows)
        for part in found:
            data = part.file.read_bytes()[part.offset : part.offset + part.count * part.width]
            wanted = table[
                rows.start + part.first : rows.start + part.first + part.count, part.at : part.at + part.width
            ]
            assert data == wanted.contiguous().numpy().tobytes()


def refusals(group: Group, folder: Path) -> list[str]:
    """On each rank: what is said to requests that cannot be."""
    said = []
    for problem, ask in (("unknown", "ring"),):
        try:
            make_exchange(ask, Setup(tables(group, 4, "auto", "fp32", "device", None, folder), group, None, 8, False))  # type: ignore[arg-type]
        except ValueError as error:
            said.append(f"{problem}: {error}")
    return said


def test_an_exchange_that_cannot_be_is_refused_by_every_rank(ranks, tmp_path):
    said = ranks.run(refusals, tmp_path)
    assert said[0] == [f"unknown: ngram_exchange is 'ring'; expected auto, {', '.join(KINDS)}"]
    assert all(each == said[0] for each in said)


def test_a_split_is_a_value():
    assert split(specs(4)[0], 2) == Split(8, (0, specs(4)[0].offsets[4], specs(4)[0].num_rows), True)
