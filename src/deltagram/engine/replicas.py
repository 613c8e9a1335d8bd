"""Engines of several ranks that hold the tables of one model together: they step together, each with its own requests.

Before each step all ranks say how many tokens theirs has. From that, and nothing else, every rank derives the slot of
the step's exchange, and whether there is a step at all; a rank without work brings the others its rows. The step is
over for all when nobody has work: then `assist` returns, on every rank.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from deltagram.models.base import Model
from deltagram.models.qwen4_exp import Qwen4Exp
from deltagram.ngram.exchange_choice import Setup, make_exchange
from deltagram.ngram.run_ahead import RunAhead
from deltagram.ngram.sharding import SplitTables
from deltagram.ngram.stores import HostStore, RowStore
from deltagram.parallel.groups import Group, number_of
from deltagram.step.plan import StepPlan


class Replicas:
    """This rank's side of the agreement. closing: whether a rank has left for good; see `leave`."""

    def __init__(self, group: Group, run_ahead: RunAhead | None) -> None:
        self.group, self.run_ahead = group, run_ahead
        self.anyone, self.closing = False, False
        self._step = 0
        self._history = "0" * 16  # digest of all that was agreed on so far

    @contextmanager
    def step(self, plan: StepPlan) -> Iterator[None]:
        """Around the launch of this rank's step. An error in it is made known, as the others wait for this rank."""
        self._agree(plan.bucket.tokens)
        with self.group.watchdog.step(self._step, plan.digest()):
            try:
                yield
            except Exception as error:
                self.group.watchdog.fail(error)
                raise

    def step_without_work(self) -> None:
        """In place of `step` on a rank that has nothing to run: what the others' steps need of it."""
        self._agree(0)
        if self.anyone:
            with self.group.watchdog.step(self._step, ""):
                if self.run_ahead is not None:
                    self.run_ahead.assist()

    def leave(self) -> None:
        """Agree that there will be no more steps. Every other rank is in `step_without_work`."""
        self._agree(0, closing=True)

    def _agree(self, num_tokens: int, closing: bool = False) -> None:
        """Raises DisagreementError unless all that was agreed on before is the same everywhere."""
        found = self.group.gather_numbers([num_tokens, closing, number_of(self._history)])
        self.group.check_same([digest for _, _, digest in found], "history of steps")
        slot = max(tokens for tokens, _, _ in found)
        self.anyone = slot > 0
        self.closing = self.closing or any(each for _, each, _ in found)
        self._step += 1
        agreed = f"{self._history} {self._step} {slot} {self.closing}"
        self._history = hashlib.blake2b(agreed.encode(), digest_size=8).hexdigest()
        if self.run_ahead is not None:
            self.run_ahead.slot = slot


def bring_together(
    model: Model, group: Group, max_tokens: int, exchange: str, dtype: torch.dtype
) -> tuple[Replicas, list[str]]:
    """Let the ranks' models, each of which holds its part of the tables, exchange rows; with notes for the user.

    max_tokens: the largest step. exchange: of exchange_choice.py. Every rank calls it. Raises ValueError, on every
    rank, for an exchange that is not possible.
    """
    if not isinstance(model, Qwen4Exp) or model.run_ahead is None:
        return Replicas(group, None), []
    run_ahead, holding = model.run_ahead, model.holding
    assert holding is not None, "the ranks have the tables together"
    _agree_on_crossover(run_ahead.stores, group)
    cuts = tuple(cut for cut in map(holding.cut, model.specs) if cut is not None)
    if not cuts:
        return Replicas(group, run_ahead), [f"{group.size} ranks share one copy of the memory tables"]
    tables = SplitTables(cuts, tuple(run_ahead.stores), group.rank, dtype)
    setup = Setup(tables, group, group.communicator("chain"), max_tokens, same_tokens=False)
    run_ahead.exchange, passed_over = make_exchange(exchange, setup)
    way = "heads" if cuts[0].by_heads else "rows"
    why = "".join(f"; not {each}" for each in passed_over)
    note = f"the memory tables are split by {way} over {group.size} ranks; exchange: {run_ahead.exchange.name}{why}"
    return Replicas(group, run_ahead), [note]


def _agree_on_crossover(stores: Sequence[RowStore], group: Group) -> None:
    """Rank 0 measures how many rows each table in host memory is read in place for, and all take it."""
    for store in stores:
        below = getattr(store, "below", store)
        if isinstance(below, HostStore) and below.by_host is not None and below.crossover is None:
            below.crossover = group.broadcast_decision(below.measure_crossover() if group.rank == 0 else None)
