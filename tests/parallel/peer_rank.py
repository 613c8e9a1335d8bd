"""One rank of test_peer.py: what goes through peer memory against what a process that has everything finds.

python peer_rank.py DEVICE ROUNDS, or for what must be refused: python peer_rank.py DEVICE refuse
"""

import random
import sys
import time

import torch

from deltagram.kernels.row_decode import row_decode
from deltagram.kernels.row_lookup import row_lookup
from deltagram.ngram.exchange import CollectiveExchange
from deltagram.ngram.formats import RowFormat
from deltagram.ngram.lamport_exchange import LamportExchange, width
from deltagram.ngram.peer_exchange import PeerExchange
from deltagram.ngram.sharding import Split, SplitTables
from deltagram.ngram.stores import DeviceStore
from deltagram.parallel.groups import Communicator, Group, join
from deltagram.parallel.lamport import LamportAllGather, blocks_beside
from deltagram.parallel.peer_memory import patience, peer_memory
from deltagram.testing.ngram import FORMATS, SCALE, random_table, same_bits

LAYERS, COLUMNS, ROWS, SLOT, SHORT = 2, 8, 800, 12, 9
WIDE = RowFormat(torch.float8_e4m3fn, 256, group=32)


class Case:
    """Split tables of random rows, and what anybody finds in them."""

    def __init__(self, group: Group, form: RowFormat, dtype: torch.dtype | None) -> None:
        self.group, self.form, self.dtype, device = group, form, dtype, group.device
        self.whole = [random_table(form, ROWS, seed=layer).to(device) for layer in range(LAYERS)]
        cut = Split(COLUMNS, tuple(ROWS * rank // group.size for rank in range(group.size + 1)), True)
        stores = []
        for table in self.whole:
            rows = cut.rows(group.rank)
            store = DeviceStore(len(rows), form, device)
            store.table.copy_(table[rows.start : rows.stop])
            if store.scale is not None:
                store.scale.fill_(SCALE)
            stores.append(store)
        self.scale = stores[0].scale
        self.tables = SplitTables((cut,) * LAYERS, tuple(stores), group.rank, dtype)

    def ids(self, count: int, generator: torch.Generator) -> torch.Tensor:
        first = torch.arange(COLUMNS) * ROWS // COLUMNS
        ids = torch.randint(ROWS // COLUMNS, (LAYERS, count, COLUMNS), generator=generator) + first
        return ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.1, -1).to(self.group.device)

    def want(self, layer: int, ids: torch.Tensor) -> torch.Tensor:
        if self.dtype is None:
            return row_lookup(self.whole[layer], ids[layer])
        form = self.form
        given = self.whole[layer], ids[layer], form.values, form.dim, self.dtype, form.group, self.scale
        return row_decode(*given)


def check_peer(group: Group, case: Case, chain: Communicator, rounds: int, same_tokens: bool) -> None:
    memory = peer_memory(PeerExchange.nbytes(case.tables, SHORT, same_tokens), group)
    above = CollectiveExchange(case.tables, chain, same_tokens)
    exchange = PeerExchange(case.tables, memory, SHORT, patience(group), same_tokens, above, chain)
    shared, own = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1 if same_tokens else 2 + group.rank)
    held = SHORT
    ids = case.ids(held, own)
    graph = captured(exchange, ids, SHORT) if group.device.type == "cuda" else None
    for turn in range(rounds):
        delay(group.rank, turn)
        slot = int(torch.randint(1, SLOT + 1, (1,), generator=shared))
        count = int(torch.randint(slot + 1, (1,), generator=own))
        wanted = case.ids(count, own)
        rows = exchange.exchange(wanted, slot)
        for layer in range(LAYERS):
            assert same_bits(rows.take(layer), case.want(layer, wanted)), (turn, layer)
        if turn % (rounds // 2) == rounds // 4:
            exchange.check()
            exchange.release()
            if turn > rounds // 2:  # the tables come back elsewhere
                for store in exchange.stores:
                    store.table = store.table.clone()
            exchange.take_back()
        if graph is not None and turn % 10 == 0:
            ids.copy_(case.ids(held, own))
            graph[0].replay()
            for layer in range(LAYERS):
                assert same_bits(graph[1][layer], case.want(layer, ids)), (turn, layer)
    exchange.check()


def captured(exchange, ids: torch.Tensor, slot: int) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]:
    """A graph of an exchange, and the rows that its replays leave."""
    exchange.exchange(ids, slot)
    torch.cuda.synchronize()
    exchange.memory.barrier()
    graph = torch.cuda.CUDAGraph()
    chain, exchange.communicator = exchange.communicator, None
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        rows = exchange.exchange(ids, slot)
        found = [rows.take(layer) for layer in range(LAYERS)]
    exchange.communicator = chain
    return graph, found


def check_lamport(group: Group, case: Case, chain: Communicator, rounds: int) -> None:
    """As an exchange of decoded rows, and bare with parts that go to the collective when long."""
    tables, blocks = case.tables, blocks_beside(group.device, ranks_here=group.size if group.shared_card else 1)
    assert tables.dtype is not None
    size = LamportAllGather.nbytes(group.size, LAYERS * SHORT, width(tables), tables.dtype)
    memory = peer_memory(size, group)
    lamport = LamportAllGather(memory, LAYERS * SHORT, width(tables), tables.dtype, blocks, patience(group), chain)
    exchange = LamportExchange(tables, lamport, SHORT, CollectiveExchange(tables, chain, True))
    generator = torch.Generator().manual_seed(5)
    for turn in range(rounds):
        delay(group.rank, turn)
        slot = int(torch.randint(1, SLOT + 1, (1,), generator=generator))
        ids = case.ids(int(torch.randint(slot + 1, (1,), generator=generator)), generator)
        rows = exchange.exchange(ids, slot)
        for layer in range(LAYERS):
            want = case.want(layer, ids)
            want = torch.where(want == 0, 0.0, want).to(want.dtype) if slot <= SHORT else want
            assert same_bits(rows.take(layer), want), (turn, layer)
        count = int(torch.randint(0, LAYERS * SHORT + 4, (1,), generator=generator))
        parts = torch.randn(group.size, count, width(tables), generator=generator).to(tables.dtype)
        parts[:, :, ::3] *= -0.0
        want = torch.cat(list(parts), 1)
        want = torch.where(want == 0, 0.0, want).to(want.dtype) if count <= LAYERS * SHORT else want
        assert same_bits(lamport.gather(parts[group.rank].to(group.device)).cpu(), want), turn
        if turn == rounds // 2:
            exchange.check()
            lamport.release()
            lamport.take_back()
    exchange.check()


def delay(rank: int, turn: int) -> None:
    """Ranks fall behind each other at random."""
    chance = random.Random(turn * 8 + rank)
    if chance.random() < 0.1:
        time.sleep(chance.random() * 0.004)


def main() -> None:
    torch.set_num_threads(1)
    group = join(sys.argv[1], deadline=60.0)
    if sys.argv[2] == "refuse":
        try:
            peer_memory(1 << 50, group)
        except ValueError as error:
            print(f"rank {group.rank}: {error}", flush=True)
        group.close()
        return
    rounds, chain = int(sys.argv[2]), group.communicator("chain")
    check_peer(group, Case(group, FORMATS["ue8m0"], None), chain, rounds, False)
    check_peer(group, Case(group, FORMATS["one scale"], torch.float32), chain, rounds // 4, True)
    check_peer(group, Case(group, WIDE, torch.bfloat16), chain, rounds // 4, False)
    check_lamport(group, Case(group, FORMATS["ue8m0"], torch.bfloat16), chain, rounds // 2)
    check_lamport(group, Case(group, FORMATS["fp32"], torch.float32), chain, rounds // 4)
    print(f"rank {group.rank} of {group.size} on {group.device}: as one process", flush=True)
    group.close()


if __name__ == "__main__":
    main()
