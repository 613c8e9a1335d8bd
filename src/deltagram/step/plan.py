"""What a step runs, decided on the host: a StepPlan lists, in order, each request's share of the step.

The scheduler makes plans from host state alone, so every rank that sees the same requests makes the same plan.
"""

import enum
import hashlib
from dataclasses import dataclass
from typing import NamedTuple


class Kind(enum.IntEnum):
    """What a sequence (a request's part of a step) is. It follows the request's history, never a length."""

    DECODE = 0  # one token: the last one sampled
    VERIFY = 1  # the last one sampled and its drafted followers
    PREFILL = 2  # a chunk of tokens that are all known: a prompt, or a preempted request's text
    PAD = 3  # fills the bucket; owns nothing, reads nothing, writes nothing


class Entry(NamedTuple):  # a step has dozens: a dataclass that is frozen takes twice as long to make
    """One request's part of a step.

    `row` is the request's row of the token history and page table, `generation` counts the owners that row has had,
    `slot` is its slot of the state pools. `start` is the number of tokens computed before this step: for prefill it
    is exact; for decode and verify the device derives it from the token history, since a step may be planned before
    the last one ended: it is then at most `start`, and at least `uncertain` less.

    The last `num_draft` of the new tokens are drafts: those of `drafts`, or, without these, what the step before left
    in the history. `wanted` is how many drafts a draft head makes for the next step.
    """

    row: int
    generation: int
    slot: int
    kind: Kind
    num_new: int
    start: int
    num_draft: int = 0
    is_last_chunk: bool = True
    uncertain: int = 0
    drafts: tuple[int, ...] = ()
    wanted: int = 0

    @property
    def samples(self) -> bool:
        """Whether this sequence yields a token: every decode and verify, and the chunk that ends a prefill."""
        return self.kind is not Kind.PREFILL or self.is_last_chunk

    @property
    def num_samples(self) -> int:
        """Tokens that are sampled after: the last one, and before it each that a draft follows."""
        return 1 + self.num_draft if self.samples else 0


@dataclass(frozen=True, slots=True)
class Bucket:
    """The capacity a step is padded to: tokens, sequences, and whether it may hold prefill chunks.

    `max_draft` is the most drafted tokens a sequence of it may bring, or its last step has left to the rings; each of
    them, and the token before, is sampled after. `samples`, if given, is the exact number of tokens that are, for a
    step that is not captured.
    """

    tokens: int
    sequences: int
    mixed: bool
    max_draft: int = 0
    samples: int | None = None

    @property
    def num_samples(self) -> int:
        """How many tokens the step samples after, at most."""
        return min(self.tokens, self.sequences * (1 + self.max_draft)) if self.samples is None else self.samples

    @property
    def chunks(self) -> int:
        """How many chunks of 64 tokens the prefill sequences of any plan in this bucket can have."""
        if not self.mixed:
            return 0
        prefills = min(self.sequences, self.tokens)
        return min(self.tokens, -(-self.tokens // CHUNK) + max(prefills - 1, 0))

    def __str__(self) -> str:
        return f"{self.tokens}x{self.sequences}{'m' if self.mixed else 't'}"


CHUNK = 64  # tokens; the chunk of the gated delta rule, and what non-final prefill chunks end on a multiple of


@dataclass(frozen=True, slots=True)
class PageGrant:
    """Page `page` of the cache becomes the `index`-th page of the request in `row`, from this step on."""

    row: int
    index: int
    page: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: its entries ordered decode, verify, prefill, and the pages granted to them."""

    step_id: int
    bucket: Bucket
    entries: tuple[Entry, ...]
    grants: tuple[PageGrant, ...] = ()

    def __post_init__(self) -> None:
        last, tokens, samples = Kind.DECODE, 0, 0
        rows, most, prefill = set(), self.bucket.max_draft, Kind.PREFILL
        for entry in self.entries:
            row, _, _, kind, num_new, start, num_draft, is_last, _, drafts, wanted = entry
            assert kind >= last, "entries are ordered decode, verify, prefill"
            last = kind
            assert num_new >= 1 and start >= 0
            assert not drafts or len(drafts) == num_draft, "all drafts are given, or none"
            assert num_draft <= most >= wanted
            assert kind is prefill or num_new == 1 + num_draft, "each token but a prompt's is sampled after"
            rows.add(row)
            tokens += num_new
            if kind is not prefill or is_last:  # as `num_samples`
                samples += 1 + num_draft
        assert last is not Kind.PAD, "padding is the bucket's, not an entry"
        assert len(rows) == len(self.entries), "a request has one entry in a step"
        assert tokens <= self.bucket.tokens and len(self.entries) <= self.bucket.sequences
        assert samples <= self.bucket.num_samples, "the bucket has no room for the tokens that are sampled after"
        assert self.bucket.mixed or last is not Kind.PREFILL, "a tokens-only bucket runs no prefill"

    @property
    def num_tokens(self) -> int:
        """Tokens run by the step, padding aside."""
        return sum(entry.num_new for entry in self.entries)

    @property
    def num_samples(self) -> int:
        """Tokens that are sampled after."""
        return sum(entry.num_samples for entry in self.entries)

    @property
    def name(self) -> str:
        """`decode`, `prefill` or `mixed`, for traces."""
        if not self.entries or self.entries[-1].kind is not Kind.PREFILL:
            return "decode"
        return "prefill" if self.entries[0].kind is Kind.PREFILL else "mixed"

    def digest(self) -> str:
        """A hash of everything a rank must agree on before it runs the step."""
        return hashlib.blake2b(repr(self).encode(), digest_size=8).hexdigest()
