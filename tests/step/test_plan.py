"""What a plan refuses, what its digest covers, and that a bucket has room for every plan it may hold."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltagram.kernels._gates import FEW_ROWS, ROWS_IN_PARTS, SOME_ROWS
from deltagram.step.buckets import ExactBuckets, Ladder
from deltagram.step.plan import Bucket, Entry, Kind, PageGrant, StepPlan
from deltagram.step.sequences import max_grants, pack

DECODE = Entry(row=0, generation=1, slot=0, kind=Kind.DECODE, num_new=1, start=7)
PREFILL = Entry(row=1, generation=1, slot=1, kind=Kind.PREFILL, num_new=64, start=64, is_last_chunk=False)
PLAN = StepPlan(3, Bucket(80, 2, mixed=True), (DECODE, PREFILL), (PageGrant(row=1, index=1, page=5),))


def test_a_sequence_samples_unless_its_prefill_goes_on() -> None:
    assert DECODE.samples and not PREFILL.samples and PREFILL._replace(is_last_chunk=True).samples
    assert (PLAN.num_tokens, PLAN.name) == (65, "mixed")
    assert replace(PLAN, entries=(DECODE,)).name == "decode" and replace(PLAN, entries=(PREFILL,)).name == "prefill"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"entries": (PREFILL, DECODE)}, "ordered"),
        ({"entries": (DECODE, PREFILL._replace(row=0))}, "one entry"),
        ({"entries": (DECODE._replace(kind=Kind.PAD),)}, "padding is the bucket's"),
        ({"bucket": Bucket(80, 2, mixed=False)}, "runs no prefill"),
        ({"bucket": Bucket(64, 2, mixed=True)}, None),
        ({"bucket": Bucket(80, 1, mixed=True)}, None),
        ({"entries": (DECODE._replace(num_new=0),)}, None),
        ({"entries": (DECODE._replace(start=-1),)}, None),
        ({"entries": (DECODE._replace(num_new=2),)}, "sampled after"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(changes: dict, reason: str | None) -> None:  # type: ignore[type-arg]
    with pytest.raises(AssertionError, match=reason):
        replace(PLAN, **changes)


def test_the_digest_covers_every_field() -> None:
    same = StepPlan(3, Bucket(80, 2, mixed=True), (DECODE._replace(), PREFILL._replace()), (PageGrant(1, 1, 5),))
    assert same.digest() == PLAN.digest()
    others = [replace(PLAN, step_id=4), replace(PLAN, bucket=Bucket(81, 2, True)), replace(PLAN, grants=())]
    for field, value in (("row", 2), ("generation", 2), ("slot", 2), ("start", 8), ("uncertain", 1)):
        others.append(replace(PLAN, entries=(DECODE._replace(**{field: value}), PREFILL)))
    for fields in ({"num_new": 2, "num_draft": 1}, {"num_new": 2, "num_draft": 1, "drafts": (7,)}, {"wanted": 1}):
        drafting = replace(PLAN.bucket, max_draft=1)
        others.append(replace(PLAN, bucket=drafting, entries=(DECODE._replace(**fields), PREFILL)))
    others.append(replace(PLAN, entries=(DECODE, PREFILL._replace(is_last_chunk=True))))
    others.append(replace(PLAN, entries=(DECODE, PREFILL._replace(num_new=63))))
    others.append(replace(PLAN, entries=(DECODE._replace(kind=Kind.VERIFY), PREFILL)))
    digests = {plan.digest() for plan in others}
    assert len(digests) == len(others) and PLAN.digest() not in digests


@given(st.lists(st.integers(1, 200), min_size=1, max_size=8), st.integers(0, 3), st.integers(0, 100), st.integers(0, 4))
def test_every_plan_of_a_bucket_fits_its_chunks_and_grants(
    prefills: list[int], decodes: int, spare_tokens: int, spare_sequences: int
) -> None:
    """The worst case of pages: each sequence begins a page with its first token."""
    bucket = Bucket(sum(prefills) + decodes + spare_tokens, len(prefills) + decodes + spare_sequences, mixed=True)
    sizes = [1] * decodes + prefills
    kinds = [Kind.DECODE] * decodes + [Kind.PREFILL] * len(prefills)
    entries = tuple(Entry(i, 1, i, kind, size, 64) for i, (kind, size) in enumerate(zip(kinds, sizes, strict=True)))
    grants = tuple(PageGrant(i, 1 + j, 0) for i, size in enumerate(sizes) for j in range(-(-size // 64)))
    assert len(grants) <= max_grants(bucket, 64)
    needed = sum(-(-size // 64) for size in prefills)
    assert needed <= bucket.chunks
    pack(StepPlan(0, bucket, entries, grants), 64, pad_row=99, pad_slot=99)  # would not fit the buffer


def test_the_bound_on_chunks_is_reached() -> None:
    assert Bucket(66, 2, mixed=True).chunks == 3  # 65 + 1
    assert Bucket(3, 8, mixed=True).chunks == 3 and Bucket(8, 8, mixed=False).chunks == 0


def test_buckets() -> None:
    assert ExactBuckets().fit(5, 2, mixed=True) == Bucket(5, 2, True)
    ladder = Ladder(decode=(1, 4, 16), mixed=(16, 64), sequences=8, max_draft=1)
    assert ladder.fit(1, 1, mixed=False) == Bucket(1, 1, False, 1)
    assert ladder.fit(5, 3, mixed=False) == Bucket(16, 8, False, 1)
    assert ladder.fit(5, 3, mixed=True) == Bucket(16, 8, True, 1)
    assert str(ladder.fit(64, 8, True)) == "64x8m" and str(ladder.fit(4, 2, False)) == "4x4t"
    assert [str(bucket) for bucket in ladder.buckets] == ["64x8m", "16x8m", "16x8t", "4x4t", "1x1t"]
    with pytest.raises(ValueError, match="65 tokens and 1 sequences is larger than the largest, of 64 tokens and 8"):
        ladder.fit(65, 1, mixed=True)
    with pytest.raises(ValueError, match="a step of 9 tokens and 9 sequences"):
        ladder.fit(9, 9, mixed=False)


@pytest.mark.parametrize(("most", "sequences", "drafts"), [(512, 16, 0), (2048, 64, 5), (79, 1, 3), (100, 37, 0)])
def test_a_ladder_holds_every_step_with_little_padding(most: int, sequences: int, drafts: int) -> None:
    ladder = Ladder.of(most, sequences, drafts)
    for mixed, largest in ((True, most), (False, sequences * (1 + drafts))):
        sizes = [ladder.fit(tokens, 1, mixed).tokens for tokens in range(1, largest + 1)]
        padding = [(size - tokens) / size for tokens, size in enumerate(sizes, 1) if tokens >= 8 or not mixed]
        assert sum(padding) / len(padding) < 0.15
    assert len(ladder.buckets) < 60


def test_no_step_is_padded_past_the_rows_of_a_kernel() -> None:
    ladder = Ladder.of(512, 100)
    for gate in (FEW_ROWS, SOME_ROWS, ROWS_IN_PARTS):
        assert ladder.fit(gate, gate, False).tokens == ladder.fit(gate, 1, True).tokens == gate


def test_what_a_bucket_samples_at_most() -> None:
    assert Bucket(64, 8, True).num_samples == 8 and Bucket(4, 8, False).num_samples == 4
    assert Bucket(64, 8, True, max_draft=5).num_samples == 48 and Bucket(64, 8, True, samples=3).num_samples == 3


@pytest.mark.parametrize("tokens", [(), (0, 4), (4, 4), (8, 4)])
def test_a_ladder_that_does_not_rise_is_refused(tokens: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="a ladder's mixed must be increasing and positive"):
        Ladder((1,), tokens, 1)
