"""The deltas of a sequence, joined, are the text of all its ids: whatever the tokens, characters and stop strings."""

import string

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers

from deltagram.engine.detokenizer import _BYTES, Detokenizer, token_bytes
from deltagram.engine.tokenizer import Tokenizer

CHARACTERS = {byte: character for character, byte in _BYTES.items()}
WORDS = ["é", "日本", "😀", " the", "the", "\ufffd", "a\ufffd", "in", "ing", "👩‍👩‍👧", "\n\n", " ", "ab", "abc"]


def byte_level():
    """A token for every byte, for the words, and for stretches of bytes that cut characters in two."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.decoder = decoders.ByteLevel()
    cut = [b"\xe6\x97", b"\xa5\xe6", b"a\xf0\x9f", b"\x98\x80b", b"\xbf\xbd"]
    pieces = ["".join(CHARACTERS[b] for b in raw) for raw in (*map(str.encode, WORDS), *cut)]
    backend.add_tokens([AddedToken(piece, normalized=False) for piece in dict.fromkeys([*_BYTES, *pieces])])
    backend.add_tokens([AddedToken("é☃", normalized=False)])  # not of the alphabet: stands for itself
    backend.add_special_tokens(["<|end|>"])
    return Tokenizer(backend)


def byte_fallback():
    """As in Llama 2: leading spaces are drawn as an underline and stripped once, unknown characters are byte tokens."""
    pieces = [
        "<unk>",
        *(f"<0x{b:02X}>" for b in range(256)),
        "▁",
        *string.ascii_lowercase,
        "é",
        "▁the",
        "▁▁",
        "th",
        "the",
    ]
    backend = tokenizers.Tokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend)


def metaspace():
    pieces = ["<unk>", "▁", *string.ascii_lowercase, "▁a", "▁the", "日", "\ufffd", "▁\ufffd"]
    backend = tokenizers.Tokenizer(models.WordLevel({p: i for i, p in enumerate(pieces)}, unk_token="<unk>"))
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["</s>"])
    return Tokenizer(backend)


def word_piece():
    pieces = ["[UNK]", "do", "n", "##n", "'", "t", "##t", ".", ",", "a", "##ing", "日", "!"]
    backend = tokenizers.Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.add_special_tokens(["[SEP]"])
    return Tokenizer(backend)


BYTE_LEVEL, BYTE_FALLBACK, METASPACE, WORD_PIECE = byte_level(), byte_fallback(), metaspace(), word_piece()
BYTE_IDS = {token_bytes(token): i for token, i in BYTE_LEVEL.backend.get_vocab().items()}


def deltas_of(tokenizer, ids, **kwargs):
    detokenizer = Detokenizer(tokenizer, **kwargs)
    deltas = []
    for i in ids:
        deltas.append(detokenizer.push(i))
        if detokenizer.stopped:
            break
    return [*deltas, detokenizer.flush()], detokenizer


def ids_of(tokenizer):
    return st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=30)


@st.composite
def spelled(draw, texts):
    """A text and ids that spell it: its bytes cut at random places into tokens that exist."""
    text, ids = draw(texts), []
    raw = text.encode()
    while raw:
        n = draw(st.sampled_from([n for n in range(1, len(raw) + 1) if raw[:n] in BYTE_IDS]))
        ids.append(BYTE_IDS[raw[:n]])
        raw = raw[n:]
    return text, ids


PIECES = st.lists(st.sampled_from([*WORDS, *"xyz é😀"]), max_size=12).map("".join)


def test_kinds():
    assert BYTE_LEVEL.is_byte_level
    assert not any(t.is_byte_level for t in (BYTE_FALLBACK, METASPACE, WORD_PIECE))
    assert set(BYTE_IDS) >= {bytes([b]) for b in range(256)} | {w.encode() for w in WORDS}


@settings(max_examples=300)
@given(spelled(PIECES | st.text(max_size=10)))
def test_whole_characters_only(case):
    text, ids = case
    assert BYTE_LEVEL.decode(ids) == text
    deltas, _ = deltas_of(BYTE_LEVEL, ids)
    assert "".join(deltas) == text
    raw, shown = b"", ""
    for i, delta in zip(ids, deltas, strict=False):
        raw += token_bytes(BYTE_LEVEL.backend.id_to_token(i))
        shown += delta
        assert shown == raw.decode("utf-8", "ignore")  # all whole characters and nothing else: at once, never half


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize(
    "tokenizer", [BYTE_LEVEL, METASPACE, WORD_PIECE], ids=["byte level", "metaspace", "word piece"]
)
def test_any_ids(tokenizer, skip):
    """Also broken characters, special tokens and ids without a token."""

    @settings(max_examples=300)
    @given(ids_of(tokenizer))
    def check(ids):
        deltas, _ = deltas_of(tokenizer, ids, skip_special_tokens=skip)
        assert "".join(deltas) == tokenizer.decode(ids, skip_special_tokens=skip)

    check()


@settings(max_examples=300)
@given(st.lists(st.text(st.sampled_from(" theéx日😀\ufffd"), max_size=6) | st.just("</s>"), max_size=6), st.booleans())
def test_byte_fallback(parts, skip):
    ids = [i for part in parts for i in BYTE_FALLBACK.backend.encode(part).ids]
    deltas, _ = deltas_of(BYTE_FALLBACK, ids, skip_special_tokens=skip)
    assert "".join(deltas) == BYTE_FALLBACK.decode(ids, skip_special_tokens=skip)


@settings(max_examples=200)
@given(st.lists(st.integers(0x80, 0xFF), max_size=4), st.booleans())
def test_byte_fallback_never_waits_for_broken_characters(junk, more):
    """Broken from the first character on, whatever follows."""
    ids = [BYTE_FALLBACK.backend.token_to_id(f"<0x{b:02X}>") for b in [0xFF, *junk]]
    ids += BYTE_FALLBACK.backend.encode("the日").ids if more else []
    deltas, _ = deltas_of(BYTE_FALLBACK, ids)
    assert "".join(deltas) == BYTE_FALLBACK.decode(ids)
    assert deltas[: 1 + len(junk)] == ["\ufffd"] * (1 + len(junk))


def test_an_unfinished_character_is_shown_at_the_end():
    for tokenizer, token in ((BYTE_LEVEL, CHARACTERS[0xE6]), (BYTE_FALLBACK, "<0xE6>")):
        assert deltas_of(tokenizer, [tokenizer.backend.token_to_id(token)])[0] == ["", "\ufffd"]


def naive_cut(text, stops, include):
    """Character by character: the first moment at which the text ends with a stop string."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: end if include else min(starts)], True
    return text, False


@settings(max_examples=500)
@given(
    spelled(st.text("ab\ufffdé", max_size=14)),
    st.lists(st.text("ab\ufffdé", min_size=1, max_size=5), min_size=1, max_size=3),
    st.booleans(),
)
def test_stop_strings(case, stops, include):
    text, ids = case
    deltas, detokenizer = deltas_of(BYTE_LEVEL, ids, stop=stops, include_stop=include)
    assert ("".join(deltas), detokenizer.stopped) == naive_cut(text, stops, include)
    taken, shown = b"", ""
    for i, delta in zip(ids, deltas, strict=False):
        taken += token_bytes(BYTE_LEVEL.backend.id_to_token(i))
        shown += delta
        sure = taken.decode("utf-8", "ignore")
        cut, stopped = naive_cut(sure, stops, include)
        held = max(n for stop in stops for n in range(len(stop)) if sure.endswith(stop[:n]))
        assert shown == (cut if stopped else sure[: len(sure) - held])  # no more is held back than may become a stop


def test_text_that_was_not_searched_is_no_part_of_a_stop_string():
    detokenizer = Detokenizer(BYTE_LEVEL, stop=["ab"])
    a, b, x = (BYTE_IDS[c] for c in (b"a", b"b", b"x"))
    assert [detokenizer.push(i, look_for_stop=False) for i in (a, b, a)] == ["a", "b", "a"]
    assert [detokenizer.push(i) for i in (b, x, a)] == ["b", "x", ""]
    assert detokenizer.push(b) == "" and detokenizer.stopped
    assert detokenizer.flush() == ""
    with pytest.raises(AssertionError, match="has ended"):
        detokenizer.push(a)


def test_the_flush_can_complete_a_stop_string():
    deltas, detokenizer = deltas_of(BYTE_LEVEL, [BYTE_IDS[b"a"], BYTE_IDS[b"\xe6"]], stop=["\ufffd"])
    assert (deltas, detokenizer.stopped) == (["a", "", ""], True)
