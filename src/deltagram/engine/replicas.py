"""Engines of several ranks that hold the tables of one model together: they step together, each with its own requests.

Before each step all ranks say how many tokens theirs has. From that, and nothing else, every rank derives what the
exchange of rows needs to be the same everywhere. Where steps are captured that is the bucket: all run the largest that
one of them needs, a rank without work too. Where they are not it is the slot: a rank without work brings the others its
rows and computes nothing. When no rank has work left, `anyone` is false, on every rank.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch

from deltagram.engine.scheduler import Scheduled
from deltagram.models.base import Model
from deltagram.models.qwen4_exp import Qwen4Exp
from deltagram.ngram.exchange_choice import Setup, make_exchange
from deltagram.ngram.run_ahead import RunAhead
from deltagram.ngram.sharding import SplitTables
from deltagram.ngram.stores import HostStore, RowStore
from deltagram.parallel.groups import Group, number_of
from deltagram.step.buckets import ExactBuckets, Ladder
from deltagram.step.plan import StepPlan


class Replicas:
    """This rank's side of the agreement. closing: whether a rank has left for good; see `leave`. capturable: whether
    steps with this exchange can be captured."""

    def __init__(self, group: Group, run_ahead: RunAhead | None, capturable: bool = True) -> None:
        self.group, self.run_ahead, self.capturable = group, run_ahead, capturable
        self.anyone, self.closing = False, False
        self._step = 0
        self._history = "0" * 16  # digest of all that was agreed on so far

    def agree(
        self, scheduled: Scheduled | None, has_work: bool, buckets: ExactBuckets | Ladder | None
    ) -> Scheduled | None:
        """What this rank runs next, of what it would: the same in another bucket, a step of padding, or nothing.

        Every rank calls it before each step. buckets: those that are captured; None without. Raises DisagreementError
        unless all that was agreed on before is the same everywhere.
        """
        plan = scheduled.plan if scheduled else None
        tokens, mixed = self._gather(
            plan.bucket.tokens if plan else 0, plan is not None and plan.bucket.mixed, has_work
        )
        if not tokens:
            return None
        if buckets is not None:
            bucket = buckets.fit(tokens, 1, mixed)
            if scheduled is None or plan is None:
                return Scheduled(StepPlan(self._step, bucket, ()), (), ())
            return replace(scheduled, plan=replace(plan, bucket=bucket))
        if self.run_ahead is not None:
            self.run_ahead.slot = tokens
            if scheduled is None:
                with self.group.watchdog.step(self._step, ""):
                    self.run_ahead.assist()
        return scheduled

    @contextmanager
    def watched(self, plan: StepPlan) -> Iterator[None]:
        """Around what waits for a step. An error in it is made known, as the others wait for this rank."""
        with self.group.watchdog.step(self._step, plan.digest()):
            try:
                yield
            except Exception as error:
                self.group.watchdog.check()  # which knows better why
                self.group.watchdog.fail(error)
                raise

    def leave(self) -> None:
        """Agree that there will be no more steps. Every other rank is in `agree`, without work."""
        self._gather(0, False, False, closing=True)

    def _gather(self, tokens: int, mixed: bool, has_work: bool, closing: bool = False) -> tuple[int, bool]:
        """The most tokens of any rank, and whether any has prefill."""
        numbers = [tokens, mixed, has_work, closing, number_of(self._history)]
        # Without work ranks wait for some without end; while one has some, the next step is as late as any.
        with self.group.watchdog.step(self._step, "") if self.anyone else nullcontext():
            found = self.group.gather_numbers(numbers)
        self.group.check_same([each[-1] for each in found], "history of steps")
        most, any_mixed, anyone, any_closing = (max(each[i] for each in found) for i in range(4))
        self.anyone, self.closing = bool(anyone), self.closing or bool(any_closing)
        self._step += 1
        self.group.watchdog.enter_step(self._step)
        agreed = f"{self._history} {self._step} {most} {any_mixed} {anyone} {self.closing}"
        self._history = hashlib.blake2b(agreed.encode(), digest_size=8).hexdigest()
        return most, bool(any_mixed)


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
    max_tokens = Ladder.of(max_tokens, 1).mixed[-1]  # as the largest step is padded, where steps are captured
    cuts = tuple(cut for cut in map(holding.cut, model.specs) if cut is not None)
    if not cuts:
        return Replicas(group, run_ahead), [f"{group.size} ranks share one copy of the memory tables"]
    tables = SplitTables(cuts, tuple(run_ahead.stores), group.rank, dtype)
    setup = Setup(tables, group, group.communicator("chain"), max_tokens, same_tokens=False)
    run_ahead.exchange, passed_over = make_exchange(exchange, setup)
    way = "heads" if cuts[0].by_heads else "rows"
    why = "".join(f"; not {each}" for each in passed_over)
    note = f"the memory tables are split by {way} over {group.size} ranks; exchange: {run_ahead.exchange.name}{why}"
    # Where ranks share a card the host carries collectives, which no graph holds: no slot may need one.
    largest = getattr(run_ahead.exchange, "max_slot", 0)
    capturable = setup.communicator.on_device or max_tokens <= largest
    return Replicas(group, run_ahead, capturable), [note]


def _agree_on_crossover(stores: Sequence[RowStore], group: Group) -> None:
    """Rank 0 measures how many rows each table in host memory is read in place for, and all take it."""
    for store in stores:
        below = getattr(store, "below", store)
        if isinstance(below, HostStore) and below.by_host is not None and below.crossover is None:
            below.crossover = group.broadcast_decision(below.measure_crossover() if group.rank == 0 else None)
