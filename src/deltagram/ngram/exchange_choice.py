"""The names of the exchanges, and making the one that is asked for, or the best that is possible."""

from collections.abc import Callable
from dataclasses import dataclass

from deltagram.ngram import lamport_exchange, peer_exchange
from deltagram.ngram.exchange import CollectiveExchange, Exchange
from deltagram.ngram.lamport_exchange import LamportExchange
from deltagram.ngram.peer_exchange import PeerExchange
from deltagram.ngram.sharding import SplitTables
from deltagram.parallel import peer_memory
from deltagram.parallel.groups import Communicator, Group
from deltagram.parallel.lamport import LamportAllGather, blocks_beside, main_collective

MOST_TOKENS = 4096  # of a slot that peers read: the most that was measured, and faster than by collectives there too
MOST_GATHERED = 512  # of a slot that is Lamport-gathered; collectives are faster for parts of more than 10 MB


@dataclass(frozen=True, slots=True)
class Setup:
    """What an exchange is made for. communicator: the chain's own, nobody else's; max_tokens: the largest slot;
    same_tokens: whether the ranks have the same ids."""

    tables: SplitTables
    group: Group
    communicator: Communicator
    max_tokens: int
    same_tokens: bool


@dataclass(frozen=True, slots=True)
class Kind:
    """One exchange. `problem` says why this rank cannot have it, None if it can; `make` makes it, on all ranks."""

    problem: Callable[[Setup], str | None]
    make: Callable[[Setup], Exchange]


def _collective(setup: Setup) -> Exchange:
    return CollectiveExchange(setup.tables, setup.communicator, setup.same_tokens)


def _peer_bytes(setup: Setup) -> int:
    return PeerExchange.nbytes(setup.tables, min(setup.max_tokens, MOST_TOKENS), setup.same_tokens)


def _peer_problem(setup: Setup) -> str | None:
    problem = peer_exchange.problem(setup.tables)
    of_memory = peer_memory.problem(0 if problem else _peer_bytes(setup), setup.group)  # which all ranks must ask
    return problem or of_memory


def _peer(setup: Setup) -> Exchange:
    group, tables, chain = setup.group, setup.tables, setup.communicator
    memory = peer_memory.peer_memory(_peer_bytes(setup), group)
    above = CollectiveExchange(tables, chain, setup.same_tokens)
    most, polls = min(setup.max_tokens, MOST_TOKENS), peer_memory.patience(group)
    return PeerExchange(tables, memory, most, polls, setup.same_tokens, above, chain)


def _lamport_bytes(setup: Setup) -> int:
    tables, most = setup.tables, min(setup.max_tokens, MOST_GATHERED)
    assert tables.dtype is not None
    return LamportAllGather.nbytes(tables.ranks, tables.num_layers * most, lamport_exchange.width(tables), tables.dtype)


def _lamport_problem(setup: Setup) -> str | None:
    problem = lamport_exchange.problem(setup.tables, setup.same_tokens)
    of_memory = peer_memory.problem(0 if problem else _lamport_bytes(setup), setup.group)
    return problem or of_memory


def _lamport(setup: Setup) -> Exchange:
    group, tables, most = setup.group, setup.tables, min(setup.max_tokens, MOST_GATHERED)
    memory = peer_memory.peer_memory(_lamport_bytes(setup), group)
    chain, width = setup.communicator, lamport_exchange.width(tables)
    assert tables.dtype is not None
    others = [] if group.device.type == "cpu" else [main_collective(group.device)]
    blocks = blocks_beside(group.device, others, group.size if group.shared_card else 1)
    gather = LamportAllGather(
        memory, tables.num_layers * most, width, tables.dtype, blocks, peer_memory.patience(group), chain
    )
    return LamportExchange(tables, gather, most, CollectiveExchange(tables, chain, setup.same_tokens))


KINDS: dict[str, Kind] = {  # the first that is possible is "auto"
    "peer": Kind(_peer_problem, _peer),
    "collective": Kind(lambda setup: None, _collective),
    "lamport": Kind(_lamport_problem, _lamport),
}
AUTO = "auto"


def check_name(name: object) -> None:
    """Raises ValueError for a name that is no exchange's."""
    if name not in (AUTO, *KINDS):
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
