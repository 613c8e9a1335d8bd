"""Readers of the demo corpus on small inputs made here, and on the Debian packages where they are installed."""

import json
import struct
import zlib
from pathlib import Path

import demo_corpus
import pytest
from demo_corpus import Document
from rich.console import Console

RESULTS = Path(__file__).parents[2] / "benchmarks/results/demo_model.json"


def r_vector(strings: list[str]) -> bytes:
    """An R character vector in the XDR format, version 3, as saveRDS writes it before compression."""
    header = b"X\n" + struct.pack(">iii", 3, 0x040201, 0x030500) + struct.pack(">i", 5) + b"UTF-8"
    body = struct.pack(">ii", 16, len(strings))
    for string in strings:
        data = string.encode()
        body += struct.pack(">ii", 0x40009, len(data)) + data
    return header + body


def rdb(*vectors: list[str]) -> bytes:
    blobs = [r_vector(vector) for vector in vectors]
    return b"".join(struct.pack(">i", len(blob)) + zlib.compress(blob) for blob in blobs)


def test_rdb_holds_the_vectors_that_were_stored():
    vectors = [["Emma", "", "naïve — £5"], ["PERSUASION"]]
    assert list(demo_corpus.read_rdb(rdb(*vectors))) == vectors


@pytest.mark.parametrize(
    "damage",
    [
        lambda blob: blob[:1] + b"?" + blob[2:],  # not XDR
        lambda blob: blob[:23] + struct.pack(">i", 13) + blob[27:],  # an integer vector
        lambda blob: blob + b"\0",  # surplus
    ],
)
def test_a_damaged_r_vector_is_refused(damage):
    with pytest.raises(ValueError, match=r"expected|left"):
        demo_corpus.read_r_strings(damage(r_vector(["a", "bc"])))


def test_an_r_record_of_the_wrong_size_is_refused():
    data = rdb(["abc"])
    with pytest.raises(ValueError, match="header says"):
        list(demo_corpus.read_rdb(struct.pack(">i", 7) + data[4:]))


def test_unwrap_joins_lines_and_keeps_verse():
    lines = ["It was _very_", "well-", "known.  Indeed", "", "", "    A verse", "    of two", "", "end"]
    assert demo_corpus.unwrap(lines) == "It was very well-known. Indeed\n\nA verse\nof two\n\nend"


def test_novels_lose_headings_and_notes(tmp_path, monkeypatch):
    novel = [
        "EMMA",
        "",
        "VOLUME I",
        "CHAPTER I",
        "",
        "One",
        "two.",
        "",
        "[At this point, Volume 1 ends.]",
        "",
        "CHAPTER II",
    ]
    novel += ["", "Three.", "  * * *", "", "FINIS", "A NOTE ON THE TEXT", "", "A publisher's words."]
    path = tmp_path / "Rdata.rdb"
    path.write_bytes(rdb(novel))
    monkeypatch.setattr(demo_corpus, "NOVEL_CHAPTERS", {"Emma": 2})
    first, second = demo_corpus.austen_documents(path)
    assert first == Document("austen", "Emma 1", "EMMA, by Jane Austen. Chapter 1\n\nOne two.\n")
    assert second.text == "EMMA, by Jane Austen. Chapter 2\n\nThree.\n"
    monkeypatch.setattr(demo_corpus, "NOVEL_CHAPTERS", {"Emma": 3})
    with pytest.raises(ValueError, match="found 2 chapters, expected 3"):
        list(demo_corpus.austen_documents(path))


def bible(*, skip: str = "") -> str:
    lines = [f"B{chr(97 + i // 26)}{chr(97 + i % 26)}{chapter}:{verse} Verse  {verse}." for i in range(66)
             for chapter in (1, 2) for verse in (1, 2)]  # fmt: skip
    return "\n".join(line for line in lines if not skip or not line.startswith(skip))


def test_bible_chapters_are_named_and_hold_every_verse():
    documents = list(demo_corpus.bible_documents(bible()))
    assert len(documents) == 132
    assert documents[0] == Document("kjv", "Genesis 1", "THE KING JAMES BIBLE. Genesis 1\n\nVerse 1.\nVerse 2.\n")
    assert documents[-1].name == "Revelation 2"
    with pytest.raises(ValueError, match="verse 2 follows verse 0"):
        list(demo_corpus.bible_documents(bible(skip="Baa1:1")))
    with pytest.raises(ValueError, match="not a verse"):
        list(demo_corpus.bible_documents("Rumour 1:1 nothing"))


def test_plain_text_drops_markup_and_decodes():
    osis = (
        '<div sID="g1" type="x-p"/> <hi type="bold">Verse 1.</hi> See <reference osisRef="P.1">Ps\u202f1:1</reference>'
        '; Thom\x82 &amp; he. • <div eID="g1"/> <lg sID="l"/><l level="1" sID="a"/>One,<l eID="a"/> <l sID="b"/>two.'
        "<l eID='b'/><lg eID='l'/><table><row><cell>God.</cell><cell>(1-2)</cell></row></table> ver. #(18) end{1} `so'"
    )
    assert demo_corpus.plain_text(osis) == (
        "Verse 1. See Ps 1:1; Thomé & he.\n\nOne,\ntwo.\n\nGod. (1-2)\n\nver. (18) end 'so'"
    )
    with pytest.raises(ValueError, match="unknown markup"):
        demo_corpus.plain_text("<blink>no</blink>")


def write_module(folder: Path, blocks: list[str]) -> None:
    index, data = b"", b""
    for block in blocks:
        packed = zlib.compress(block.encode())
        index += struct.pack("<III", len(data), len(packed), len(block.encode()))
        data += packed
    folder.mkdir(parents=True)
    (folder / "ot.czs").write_bytes(index)
    (folder / "ot.czz").write_bytes(data)


def test_commentary_blocks_become_chapters(tmp_path, monkeypatch):
    monkeypatch.setattr(demo_corpus, "SWORD_COMMENTS", tmp_path)
    chapter = (
        '<chapter n="{0}" osisID="Ps.{0}" sID="Ps.{0}"/> <div type="x-p"/>Text — {0}.<div/> <chapter eID="Ps.{0}"/>'
    )
    write_module(tmp_path / "x", ["<div/>A preface.", chapter.format(1), chapter.format(2)])
    documents = list(demo_corpus.commentary_documents("x", "HEAD", ("ot",), "cz"))
    assert [document.name for document in documents] == ["Preface", "Psalm 1", "Psalm 2"]
    assert documents[2].text == "HEAD. Psalm 2\n\nText — 2.\n"
    index = tmp_path / "x/ot.czs"
    index.write_bytes(index.read_bytes()[:8] + struct.pack("<I", 1) + index.read_bytes()[12:])
    with pytest.raises(ValueError, match="its index says 1"):
        list(demo_corpus.sword_blocks(tmp_path / "x/ot", "cz"))


def test_split_is_by_document_deterministic_and_small():
    documents = [Document("a" if i % 2 else "b", str(i), "x" * (50 + i)) for i in range(400)]
    train, held_out = demo_corpus.split(documents, share=0.02)
    assert sorted((*train, *held_out), key=lambda d: int(d.name)) == documents
    assert demo_corpus.split(list(reversed(documents)), share=0.02)[1] == list(reversed(held_out))
    for source in "ab":
        size = sum(len(document.text) for document in documents if document.source == source)
        share = sum(len(document.text) for document in held_out if document.source == source) / size
        assert 0.015 < share <= 0.02


def test_an_incomplete_or_marked_up_corpus_is_refused():
    with pytest.raises(ValueError) as error:
        demo_corpus.check([Document("austen", "Emma 1", "EMMA\n\n" + "word " * 20 + "<hi>")])
    assert "austen: 1 documents, expected 269" in str(error.value)
    assert "stray '<hi>'" in str(error.value)
    assert "kjv: 0 verses, expected 31102" in str(error.value)


@pytest.mark.skipif(
    not (demo_corpus.AUSTEN_RDB.exists() and Path("/usr/bin/bible").exists() and demo_corpus.SWORD_COMMENTS.exists()),
    reason="the Debian packages of the corpus are not installed",
)
def test_the_packages_give_the_recorded_corpus():
    train, held_out = demo_corpus.split(demo_corpus.extract(Console(quiet=True)))
    recorded = json.loads(RESULTS.read_text("utf-8"))["corpus"]
    assert demo_corpus.describe(train) == recorded["train"]
    for source, summary in demo_corpus.describe(held_out).items():
        assert summary == {key: value for key, value in recorded["heldout"][source].items() if key != "names"}
