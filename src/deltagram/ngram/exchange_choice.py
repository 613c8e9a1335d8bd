"""The names of the exchanges, and making the one that is asked for, or the best that is possible."""

from collections.abc import Callable
from dataclasses import dataclass

from deltagram.ngram.exchange import CollectiveExchange, Exchange
from deltagram.ngram.sharding import SplitTables
from deltagram.parallel.groups import Group


@dataclass(frozen=True, slots=True)
class Setup:
    """What an exchange is made for: `max_tokens` is the largest slot, `same_tokens` whether ranks have the same ids."""

    tables: SplitTables
    group: Group
    max_tokens: int
    same_tokens: bool


@dataclass(frozen=True, slots=True)
class Kind:
    """One exchange. `problem` says why this rank cannot have it, None if it can; `make` makes it, on all ranks."""

    problem: Callable[[Setup], str | None]
    make: Callable[[Setup], Exchange]


def _collective(setup: Setup) -> Exchange:
    return CollectiveExchange(setup.tables, setup.group.communicator("chain"), setup.same_tokens)


KINDS: dict[str, Kind] = {"collective": Kind(lambda setup: None, _collective)}  # the first that is possible is "auto"
AUTO = "auto"


def check_name(name: str) -> None:
    """Raises ValueError for a name that is no exchange's."""
    if name != AUTO and name not in KINDS:
        raise ValueError(f"ngram_exchange is {name!r}; expected {AUTO}, {', '.join(KINDS)}")


def make_exchange(name: str, setup: Setup) -> tuple[Exchange, list[str]]:
    """The exchange called `name`, and why those before it were passed over where that is "auto".

    All ranks call it, and all get the same one: what one rank cannot have, none has. Raises ValueError, on every
    rank, for an exchange that is asked for and not possible, with the reason.
    """
    check_name(name)
    passed_over = []
    for kind in KINDS if name == AUTO else [name]:
        problem = KINDS[kind].problem(setup)
        if name == AUTO:
            reasons = [each for each in setup.group.gather_objects(problem) if each is not None]
            if reasons:
                passed_over.append(f"{kind}: {reasons[0]}")
                continue
        else:
            setup.group.check(None if problem is None else f"ngram_exchange is {name!r}, which cannot be: {problem}")
        return KINDS[kind].make(setup), passed_over
    raise AssertionError("the collective exchange is always possible")
