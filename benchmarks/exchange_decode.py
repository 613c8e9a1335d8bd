"""A data-parallel decode step of the 4B shape with two Engram layers, whose tables (24.1 GiB) the ranks hold together:
see exchange.py --decode.

Each rank decodes requests of its own. A step is the forward pass and the logits, captured; it is timed with chains that
run ahead and inline, with whole tables on every rank and split ones, in device and in host memory, exchanged by peer
reads and by collectives. What a rank with split tables computes must be what it computed with whole ones, bit by bit.
"""

import statistics
import time
from typing import Any

import torch
from decode_layers import Step
from torch import Tensor

from deltagram.ngram.exchange import Exchange
from deltagram.ngram.exchange_choice import Setup, make_exchange
from deltagram.ngram.placement import Placement, make_store, table_of
from deltagram.ngram.run_ahead import RunAhead
from deltagram.ngram.sharding import SplitTables, split
from deltagram.ngram.stores import RowStore
from deltagram.parallel.groups import Group
from deltagram.step.plan import Kind
from deltagram.testing.engram_model import EngramModel, engram_4b

BATCHES, REPLAYS, MOST = (1, 6, 16, 48), 40, 48
PLACEMENTS = ("device", "host")
Timed = dict[int, tuple[float, Tensor]]  # of each batch, milliseconds a step and logits


class Ranks:
    """This rank's model, and what it computes with one or another set of stores."""

    def __init__(self, group: Group) -> None:
        self.group, self.device = group, group.device
        self.model: EngramModel = engram_4b(4096, group.device)
        self.step = Step(self.model.config, MOST, self.model)
        torch.manual_seed(group.rank)
        self.calls = {batch: self.step.table(Kind.DECODE, batch) for batch in BATCHES}
        for _, history in self.calls.values():
            history.tokens.random_(0, self.model.config.vocab_size)

    def measure(
        self, stores: list[RowStore], exchange: Exchange | None, ahead: bool
    ) -> dict[int, tuple[float, Tensor]]:
        """For each batch, the slowest rank's milliseconds a step, and this rank's logits of a first step."""
        model, found = self.model, {}
        assert model.run_ahead is not None
        layers, projections = list(model.engrams), [each.projection for each in model.engrams.values()]
        model.run_ahead = RunAhead(layers, model.specs, stores, projections, self.device)
        model.run_ahead.go_ahead(ahead)
        model.run_ahead.exchange = exchange
        for batch, (table, history) in self.calls.items():
            model.run_ahead.slot = batch

            def run(table: Any = table, history: Any = history) -> Tensor:
                return model.logits(model.forward(table, history))

            run()
            self.ready()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
                logits = run()
            self.begin()
            self.ready()
            graph.replay()
            self.ready()
            first, taken = logits.clone(), []
            for _ in range(REPLAYS // 5):
                self.ready()
                began = time.perf_counter()
                for _ in range(5):
                    graph.replay()
                torch.cuda.synchronize()
                taken.append((time.perf_counter() - began) * 1e3 / 5)
            slowest = max(self.group.gather_objects(statistics.median(taken[1:])))
            found[batch] = (slowest, first)
        return found

    def begin(self) -> None:
        """Every request is where it was: pools of zeros."""
        for layer in self.model.linear_layers:
            assert layer.state is not None
            layer.state.recurrent.zero_()
            layer.state.conv.zero_()

    def ready(self) -> None:
        torch.cuda.synchronize()
        self.group.barrier()


def decode(group: Group) -> dict[str, Any]:
    """Milliseconds a step, the same numbers on every rank. Raises AssertionError for a bit that differs."""
    ranks, found = Ranks(group), {}
    model, chain = ranks.model, group.communicator("decode chain")
    whole = model.stores
    plain = {ahead: ranks.measure(whole, None, ahead) for ahead in (True, False)}
    for ahead, of_batches in plain.items():
        note(group, found, "whole tables on the device", ahead, of_batches, plain[True])
    cuts = tuple(split(spec, group.size) for spec in model.specs)
    for placement in PLACEMENTS:
        stores = []
        for cut, store in zip(cuts, whole, strict=True):
            rows, table = cut.rows(group.rank), table_of(store)
            mine = make_store(Placement.parse(placement), len(rows), store.format, group.device)
            held = table_of(mine)
            assert table is not None and held is not None
            held.table.copy_(table.table[rows.start : rows.stop])
            stores.append(mine)
        tables = SplitTables(cuts, tuple(stores), group.rank, torch.bfloat16)
        for name in ("peer", "collective"):
            for ahead in (True, False):
                # A communicator belongs to one stream, and each run ahead has its own.
                chain = group.communicator(f"{placement} {name} {ahead}")
                exchange, _ = make_exchange(name, Setup(tables, group, chain, MOST, False))
                of_batches = ranks.measure(stores, exchange, ahead)
                note(group, found, f"split, on the {placement}, {name}", ahead, of_batches, plain[True])
    return found


def note(group: Group, found: dict[str, Any], what: str, ahead: bool, got: Any, wanted: Any) -> None:
    same = all(torch.equal(got[batch][1], wanted[batch][1]) for batch in BATCHES)
    assert all(group.gather_objects(same)), f"{what}: other bits than with whole tables"
    name = f"{what}, {'ahead' if ahead else 'inline'}, ms"
    found[name] = {f"batch {batch}": round(ms, 4) for batch, (ms, _) in got.items()}
    if group.rank == 0:
        print(name, found[name], flush=True)
