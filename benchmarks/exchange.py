"""What it takes to bring rows of a table split over N ranks to where their tokens are: two layers, 24 columns of 264
bytes, for 1 to 4096 tokens a rank.

python benchmarks/exchange.py --ranks N                 N processes, a card each: peer reads beside NCCL
python benchmarks/exchange.py --ranks N M ... --one-card  ranks that one process plays on one card: kernels, barriers
python benchmarks/exchange.py --ranks N --decode        N processes: decode steps of a model whose tables they split
python benchmarks/exchange.py --ranks N --device cpu

Times are of captured graphs, and of calls made one by one ("eager"); each rank's clock starts after a barrier of all,
and the slowest rank counts. `nccl` is the bare collective with the bytes that the exchange moves.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from environment import save

from deltagram.kernels.row_lookup import row_lookup
from deltagram.ngram.exchange import CollectiveExchange, Exchange
from deltagram.ngram.formats import RowFormat
from deltagram.ngram.peer_exchange import PeerExchange
from deltagram.ngram.sharding import Split, SplitTables
from deltagram.ngram.stores import DeviceStore
from deltagram.parallel.groups import Group, join
from deltagram.parallel.lamport import LamportAllGather, blocks_beside, main_collective
from deltagram.parallel.launch import launch
from deltagram.parallel.peer_memory import patience, peer_memory, virtual_ranks
from deltagram.testing.timing import launches
from deltagram.testing.virtual import lockstep_us, play

LAYERS, COLUMNS = 2, 24
FORM = RowFormat(torch.float8_e4m3fn, 256, group=32)
TOKENS = (1, 6, 16, 48, 96, 384, 1024, 2048, 4096)
PROJECTED, ROWS = 25600, (1, 6, 16, 48, 96, 192, 384, 768)
REPEATS, ROUNDS = 20, 12


def tables_of(rank: int, ranks: int, device: torch.device) -> SplitTables:
    """This rank's half, quarter or eighth of two tables of 16 GiB (on a CPU: 64 MiB), random bytes."""
    rows = (1 << (34 if device.type == "cuda" else 26)) // FORM.row_bytes // COLUMNS * COLUMNS
    cut = Split(COLUMNS, tuple(rows * each // ranks for each in range(ranks + 1)), True)
    stores = []
    for _ in range(LAYERS):
        store = DeviceStore(len(cut.rows(rank)), FORM, device)
        store.table.random_(256)
        stores.append(store)
    return SplitTables((cut,) * LAYERS, tuple(stores), rank, None)


def ids_of(tables: SplitTables, tokens: int, device: torch.device) -> torch.Tensor:
    """Random ids of every column, int64 [layers, tokens, columns]."""
    each = tables.splits[0].bounds[-1] // COLUMNS
    return torch.randint(each, (LAYERS, tokens, COLUMNS), device=device) + torch.arange(COLUMNS, device=device) * each


def one_card(ranks: int, device: torch.device) -> dict[str, Any]:
    """Whole exchanges of ranks on streams of one process, and their parts."""
    from kernels import bench_peer_barrier, bench_peer_lookup, bench_peer_publish, bench_peer_unpack

    most = max(bench_peer_lookup.TOKENS)
    lookups, unpacks = bench_peer_lookup.measure(device, ranks), bench_peer_unpack.measure(device, ranks)
    publishes = bench_peer_publish.measure(device)
    found: dict[str, Any] = {
        tokens: times | {"unpack": unpacks[tokens], "publish": publishes[tokens]} for tokens, times in lookups.items()
    }
    found["barrier"] = bench_peer_barrier.measure(device, ranks)
    tables = [tables_of(rank, ranks, device) for rank in range(ranks)]
    memories = virtual_ranks(PeerExchange.nbytes(tables[0], most), ranks, device)
    exchanges = [PeerExchange(t, memory, most, 0) for t, memory in zip(tables, memories, strict=True)]
    for tokens in bench_peer_lookup.TOKENS:
        ids = [ids_of(tables[0], tokens, device) for _ in range(ranks)]
        calls = [partial(e.exchange, i, tokens) for e, i in zip(exchanges, ids, strict=True)]
        for each in exchanges:
            each.polls = 0
        play(calls, device)
        for each in exchanges:
            each.release()
        for each in exchanges:
            each.take_back()
            each.polls = 1_000_000
        found[f"{tokens} tokens"]["exchange"] = round(lockstep_us(calls, device, REPEATS), 2)
        for each in exchanges:
            each.check()
    exchanges[0].polls = 0
    found["launches of an exchange"] = launches(calls[0])
    return found


def of_group(group: Group) -> dict[str, Any]:
    """Exchanges of processes; the same numbers on every rank."""
    device, tables = group.device, tables_of(group.rank, group.size, group.device)
    most = max(TOKENS)
    chain = group.communicator("chain")
    memory = peer_memory(PeerExchange.nbytes(tables, most), group)
    above = CollectiveExchange(tables, group.communicator("all-to-all"))
    peer = PeerExchange(tables, memory, most, patience(group), communicator=chain)
    bare = dist.new_group(backend="nccl" if chain.on_device else "gloo")
    found: dict[str, Any] = {"gather of projected values": gathers(group)}
    for tokens in TOKENS if device.type == "cuda" else TOKENS[:2]:
        ids = ids_of(tables, tokens, device)
        times: dict[str, float] = {}
        for exchange in (peer, above):
            time_exchange(group, exchange, ids, times)
        peer.check()
        local = ids.clamp(max=tables.stores[0].num_rows - 1)
        table = tables.stores[0].table  # type: ignore[attr-defined]
        record(group, "local lookup", partial(row_lookup, table, local), times)
        part = torch.zeros(tokens * LAYERS * COLUMNS, dtype=torch.int32, device=device)
        everyone = part.new_empty(group.size * len(part))
        record(group, "nccl all-gather of ids", partial(dist.all_gather_into_tensor, everyone, part, bare), times)
        rows = torch.zeros(tokens * LAYERS * COLUMNS * FORM.row_bytes, dtype=torch.uint8, device=device)
        record(group, "nccl all-to-all of rows", partial(dist.all_to_all_single, rows.clone(), rows, group=bare), times)
        own = rows[: len(rows) // group.size]
        record(group, "nccl all-gather of rows", partial(dist.all_gather_into_tensor, rows, own, bare), times)
        found[f"{tokens} tokens"] = times
        if group.rank == 0:
            print(tokens, times, flush=True)
    how = "peer" if device.type == "cpu" else "peer, captured"
    other = how.replace("peer", "collective")
    faster = [n for n in TOKENS if f"{n} tokens" in found and found[f"{n} tokens"][how] < found[f"{n} tokens"][other]]
    found["most tokens for which peer reads are faster"] = max(faster, default=0)
    return found


def gathers(group: Group) -> dict[str, Any]:
    """bf16 parts that make rows of 25600 values: a Lamport gather, within its budget, beside the collective."""
    device, width, most, found = group.device, PROJECTED // group.size, max(ROWS), {}
    chain = group.communicator("gathers")
    memory = peer_memory(LamportAllGather.nbytes(group.size, most, width, torch.bfloat16), group)
    blocks = blocks_beside(device, [main_collective(device)] if device.type == "cuda" else ())
    lamport = LamportAllGather(memory, most, width, torch.bfloat16, blocks, patience(group), chain)
    for rows in ROWS if device.type == "cuda" else ROWS[:3]:
        part = torch.randn(rows, width, device=device).bfloat16()
        whole, parts = part.new_empty(rows, PROJECTED), part.new_empty(group.size, rows, width)
        times: dict[str, float] = {}
        record(group, "lamport", partial(lamport.gather, part, whole), times)
        record(group, "collective", partial(chain.all_gather, parts, part), times)
        found[f"{rows} rows"] = times
        if group.rank == 0:
            print("gather", rows, times, flush=True)
    lamport.check()
    return found | {"blocks": blocks}


def time_exchange(group: Group, exchange: Exchange, ids: torch.Tensor, times: dict[str, float]) -> None:
    def call() -> None:
        exchange.exchange(ids, ids.shape[1])

    record(group, exchange.name, call, times)


def record(group: Group, name: str, call: Callable[[], object], times: dict[str, float]) -> None:
    """Note the microseconds of one call, made on every rank: eager, and on a card captured."""
    cuda = group.device.type == "cuda"
    times[f"{name}, eager" if cuda else name] = measured(group, call, REPEATS)
    if cuda and not group.shared_card:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            for _ in range(REPEATS):
                call()
        times[f"{name}, captured"] = round(measured(group, graph.replay, 1) / REPEATS, 2)


def measured(group: Group, call: Callable[[], object], repeats: int) -> float:
    taken = []
    for _ in range(ROUNDS):
        synchronize(group)
        group.barrier()
        began = time.perf_counter()
        for _ in range(repeats):
            call()
        synchronize(group)
        taken.append((time.perf_counter() - began) * 1e6 / repeats)
    return round(max(group.gather_objects(statistics.median(taken[2:]))), 2)


def synchronize(group: Group) -> None:
    if group.device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--one-card", action="store_true")
    parser.add_argument("--decode", action="store_true")
    chosen = parser.parse_args()
    if chosen.one_card:
        found = {f"{ranks} ranks, us": one_card(ranks, torch.device("cuda")) for ranks in chosen.ranks}
        print(save("exchange_one_card", found), found)
    elif len(chosen.ranks) > 1:
        parser.error(f"--ranks is {chosen.ranks}; expected one number without --one-card")
    elif "RANK" not in os.environ:
        sys.exit(launch(sys.argv, *chosen.ranks))
    else:
        group = join(chosen.device, deadline=120.0)
        if group.device.type == "cuda":  # a communicator is for one stream, and no graph is captured on the default one
            torch.cuda.set_stream(torch.cuda.Stream(group.device))
        if chosen.decode:
            from exchange_decode import decode

            found, name = decode(group), f"exchange_decode_{group.size}_ranks"
        else:
            found, name = of_group(group), f"exchange_{group.device.type}_{group.size}_ranks"
        if group.rank == 0:
            print(save(name, found))
        group.close()


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parent))
    main()
