"""The peer exchange between ranks that one process plays on one card, all under way at once: captured, bit for bit, in
three launches and two barriers."""

from functools import partial

import pytest
import torch

from deltagram.kernels.row_lookup import row_lookup
from deltagram.ngram.formats import RowFormat
from deltagram.ngram.peer_exchange import PeerExchange, problem
from deltagram.ngram.sharding import Split, SplitTables
from deltagram.ngram.stores import DeviceStore
from deltagram.parallel.peer_memory import virtual_ranks
from deltagram.testing.ngram import random_table
from deltagram.testing.timing import launches
from deltagram.testing.virtual import play

FORM = RowFormat(torch.float8_e4m3fn, 256, group=32)
LAYERS, COLUMNS, ROWS, SLOT = 2, 24, 4800, 96


def exchanges(whole: list[torch.Tensor], ranks: int, device: torch.device) -> list[PeerExchange]:
    cut = Split(COLUMNS, tuple(ROWS * rank // ranks for rank in range(ranks + 1)), True)
    split = []
    for rank in range(ranks):
        rows, stores = cut.rows(rank), []
        for table in whole:
            stores.append(DeviceStore(len(rows), FORM, device))
            stores[-1].table.copy_(table[rows.start : rows.stop])
        split.append(SplitTables((cut,) * LAYERS, tuple(stores), rank, None))
    memories = virtual_ranks(PeerExchange.nbytes(split[0], SLOT), ranks, device)
    return [PeerExchange(tables, memory, SLOT, 0) for tables, memory in zip(split, memories, strict=True)]


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("tokens", [1, 6, 96])
def test_replays_give_the_bits_of_whole_tables(ranks, tokens):
    device = torch.device("cuda")
    whole = [random_table(FORM, ROWS, seed=layer).to(device) for layer in range(LAYERS)]
    made = exchanges(whole, ranks, device)
    ids = torch.zeros(ranks, LAYERS, tokens, COLUMNS, dtype=torch.int64, device=device)
    each = ROWS // COLUMNS

    def call(rank: int) -> torch.Tensor:
        rows = made[rank].exchange(ids[rank], tokens)
        return torch.stack([rows.take(layer) for layer in range(LAYERS)])

    assert launches(lambda: made[0].exchange(ids[0], tokens)) == 5
    play([partial(call, rank) for rank in range(ranks)], device)
    for exchange in made:
        exchange.release()
    graphs, outs = [], []
    for rank, exchange in enumerate(made):
        exchange.take_back()
        exchange.polls = 1_000_000
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[rank]):
            outs.append(call(rank))
    for _ in range(5):
        ids.random_(0, each).add_(torch.arange(COLUMNS, device=device) * each)
        ids[torch.rand(ids.shape, device=device) < 0.1] = -1
        play([graph.replay for graph in graphs], device)
        for rank, exchange in enumerate(made):
            exchange.check()
            for layer in range(LAYERS):
                assert torch.equal(outs[rank][layer], row_lookup(whole[layer], ids[rank, layer])), (rank, layer)


def test_tables_that_peers_cannot_read_are_refused():
    nowhere = torch.device("meta")
    for ranks, by_heads, reason in ((3, True, "2, 4, 8 ranks, not 3"), (2, False, "by heads, not 24 heads by rows")):
        cut = Split(COLUMNS, tuple(ROWS * rank // ranks for rank in range(ranks + 1)), by_heads)
        stores = tuple(DeviceStore(len(cut.rows(0)), FORM, nowhere) for _ in range(LAYERS))
        assert reason in problem(SplitTables((cut,) * LAYERS, stores, 0, None))
