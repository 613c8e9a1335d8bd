"""The sequence table against a loop over the plan; the history's rules."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltagram.step.buckets import ExactBuckets, Ladder
from deltagram.step.history import TokenHistory
from deltagram.step.plan import CHUNK, Entry, Kind, PageGrant, StepPlan
from deltagram.step.sequences import pack, prepare

CPU = torch.device("cpu")
PAGE, CONTEXT, ROWS = 4, 150, 5  # ROWS is the pad row
PAGES = -(-CONTEXT // PAGE)


@st.composite
def parts(draw: st.DrawFn) -> list[tuple[Kind, int, int, int]]:
    """(kind, start, new tokens, accepted drafts of the last step) of each sequence."""
    chosen = []
    for kind in sorted(
        draw(st.lists(st.sampled_from([Kind.DECODE, Kind.VERIFY, Kind.PREFILL]), min_size=1, max_size=ROWS))
    ):
        new = {Kind.DECODE: 1, Kind.VERIFY: draw(st.integers(2, 4)), Kind.PREFILL: draw(st.integers(1, 70))}[kind]
        start = draw(st.integers(kind is not Kind.PREFILL, 75))
        chosen.append((kind, start, new, draw(st.integers(0, 3)) if kind <= Kind.VERIFY else 0))
    return chosen


@settings(deadline=None)
@given(parts(), st.booleans(), st.randoms(use_true_random=False))
def test_the_table_is_what_a_loop_over_the_plan_says(parts, padded, random) -> None:  # type: ignore[no-untyped-def]
    rows = random.sample(range(ROWS), len(parts))
    history = TokenHistory(ROWS + 1, CONTEXT, CPU, every := random.randint(1, 5), few=random.choice((0, 2)))
    history.tokens.random_(0, 1000)
    history.lengths.fill_(-77)
    history.untaken.fill_(99)  # what rows that do not run hold must not matter
    page_table = torch.randint(1 << 20, 1 << 21, (ROWS + 1, PAGES), dtype=torch.int32)
    entries, grants = [], []
    for row, (kind, start, new, accepted) in zip(rows, parts, strict=True):
        drafts = new - 1 if kind is Kind.VERIFY else 0
        entries.append(
            Entry(row, 1, row, kind, new, start if kind is Kind.PREFILL else 0, drafts, random.random() < 0.5)
        )
        history.lengths[row], history.untaken[row] = (
            (start + new if kind is Kind.PREFILL else start + 1),
            99 if kind is Kind.PREFILL else accepted,
        )
        for index in range(-(-start // PAGE), -(-(start + new) // PAGE)):
            grants.append(PageGrant(row, index, random.randrange(100)))
    old_pages = page_table.clone()
    total, mixed = sum(new for _, _, new, _ in parts), parts[-1][0] is Kind.PREFILL
    buckets = Ladder((512,), (512,), 8, max_draft=3) if padded else ExactBuckets(max_draft=3)
    plan = StepPlan(0, buckets.fit(total, len(parts), mixed), tuple(entries), tuple(grants))
    packed = pack(plan, PAGE, pad_row=ROWS, pad_slot=42)
    assert packed.dtype == np.int32
    table = prepare(torch.from_numpy(packed), plan.bucket, history, page_table, PAGE)

    for grant in grants:
        old_pages[grant.row, grant.index] = grant.page
    assert torch.equal(page_table[:ROWS], old_pages[:ROWS])
    assert 0 <= page_table[ROWS, 0] < 1 << 21
    spare, spare_tokens = plan.bucket.sequences - len(parts), plan.bucket.tokens - total
    fields = "kind", "row", "slot", "cu_tokens", "cu_samples", "num_draft", "length"
    column = {name: getattr(table, name).tolist() for name in fields}
    assert column["kind"] == [entry.kind for entry in entries] + [Kind.PAD] * spare
    assert column["row"] == rows + [ROWS] * spare and column["slot"] == rows + [42] * spare
    counts = [entry.num_samples for entry in entries]
    assert column["cu_samples"] == [sum(counts[:n]) for n in range(len(entries))] + [sum(counts)] * (spare + 1)
    sampled = [
        token
        for n, count in enumerate(counts)
        for token in range(column["cu_tokens"][n + 1] - count, column["cu_tokens"][n + 1])
    ]
    assert table.sampled.tolist()[: sum(counts)] == sampled and not table.sampled[sum(counts) :].any()
    assert column["num_draft"] == [entry.num_draft for entry in entries] + [0] * spare
    assert column["length"] == [start + new for _, start, new, _ in parts] + [0] * spare
    assert table.start.tolist() == [start for _, start, _, _ in parts] + [0] * spare
    assert table.pending.tolist() == [accepted for *_, accepted in parts] + [0] * spare
    if len(parts) <= history.few:
        every = 1
    stores = [
        kind is not Kind.PREFILL and (accepted + 1 >= every or (start + row) % every == 0)
        for row, (kind, start, _, accepted) in zip(rows, parts, strict=True)
    ]
    assert table.stores.tolist() == stores + [0] * spare
    left = {
        row: 0 if stored or kind is Kind.PREFILL else accepted + 1
        for row, stored, (kind, _, _, accepted) in zip(rows, stores, parts, strict=True)
    }
    assert history.untaken.tolist() == [left.get(row, 99) for row in range(ROWS + 1)]
    ends = np.cumsum([new for _, _, new, _ in parts]).tolist()
    assert table.cu_tokens.tolist() == [0, *ends, *[total] * spare]
    chunks = [
        (n, i) for n, (kind, _, new, _) in enumerate(parts) if kind is Kind.PREFILL for i in range(-(-new // CHUNK))
    ]
    assert [tuple(pair) for pair in table.chunks.tolist()][: len(chunks)] == chunks
    assert (table.chunks[len(chunks) :, 0] == -1).all()
    assert table.counts.tolist() == [total, len(parts), len(chunks), len(grants)]
    at = [(n, start + i) for n, (_, start, new, _) in enumerate(parts) for i in range(new)]
    assert table.sequence.tolist() == [n for n, _ in at] + [-1] * spare_tokens
    assert table.position.tolist() == [position for _, position in at] + [0] * spare_tokens
    assert table.token.tolist() == [int(history.tokens[rows[n], p]) for n, p in at] + [0] * spare_tokens
    places = [int(page_table[rows[n], p // PAGE]) * PAGE + p % PAGE for n, p in at]
    assert table.cache_index.tolist() == places + [-1] * spare_tokens
    derived = "start", "length", "pending", "stores", "sequence", "position", "token"
    for name in (*derived, "kind", "cu_tokens", "chunks"):
        assert getattr(table, name).dtype == torch.int32, name
    assert table.cache_index.dtype == torch.int64


def test_a_history_row_starts_over() -> None:
    history = TokenHistory(3, 8, CPU)
    history.admit(1, [5, 6, 7])
    assert (history.lengths.tolist(), history.untaken.tolist()) == ([0, 3, 0], [0, 0, 0])
    assert history.tokens[1, :3].tolist() == [5, 6, 7]
    history.untaken[1] = 2
    history.admit(1, [2, 2])  # another owner
    assert history.lengths.tolist() == [0, 2, 0] and history.untaken.tolist() == [0, 0, 0]
    assert history.tokens[1, :2].tolist() == [2, 2]


@pytest.mark.parametrize("tokens", [[], [1, -1], [0] * 9])
def test_a_history_never_holds_a_placeholder_or_more_than_it_can(tokens: list[int]) -> None:
    with pytest.raises(AssertionError):
        TokenHistory(3, 8, CPU).admit(0, tokens)
