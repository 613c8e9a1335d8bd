"""Extract the demo model's corpus from Debian packages: plain UTF-8 text, one JSON line per document.

Sources (all in the public domain; provenance and licences in docs/demo-model.md):

| source | Debian package | read as | documents |
|--------|----------------|---------|-----------|
| `austen` | r-cran-janeaustenr | `Rdata.rdb`: zlib-compressed R serialization | 269 chapters |
| `kjv` | bible-kjv, bible-kjv-text | output of `bible -f gen1:1-rev22:21` | 1189 chapters |
| `tdavid` | sword-comm-tdavid | SWORD blocks `ot.czs`, `ot.czz`, OSIS markup | 150 psalms and a preface |
| `mhcc` | sword-comm-mhcc | SWORD blocks `{ot,nt}.bzs`, `.bzz`, OSIS markup | 1189 chapters |

The output is deterministic: `train.jsonl`, `heldout.jsonl` (whole documents, about 1.5 % of each source) and
`manifest.json` (counts, bytes, SHA-256). An incomplete or oddly marked-up source is an error, not a warning.
"""

import argparse
import hashlib
import html
import json
import re
import struct
import subprocess
import unicodedata
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track

AUSTEN_RDB = Path("/usr/lib/R/site-library/janeaustenr/data/Rdata.rdb")
SWORD_COMMENTS = Path("/usr/share/sword/modules/comments/zcom")
HELD_OUT_SHARE = 0.015

BOOK_NAMES = (
    "Genesis Exodus Leviticus Numbers Deuteronomy Joshua Judges Ruth 1_Samuel 2_Samuel 1_Kings 2_Kings 1_Chronicles "
    "2_Chronicles Ezra Nehemiah Esther Job Psalms Proverbs Ecclesiastes Song_of_Solomon Isaiah Jeremiah Lamentations "
    "Ezekiel Daniel Hosea Joel Amos Obadiah Jonah Micah Nahum Habakkuk Zephaniah Haggai Zechariah Malachi Matthew Mark "
    "Luke John Acts Romans 1_Corinthians 2_Corinthians Galatians Ephesians Philippians Colossians 1_Thessalonians "
    "2_Thessalonians 1_Timothy 2_Timothy Titus Philemon Hebrews James 1_Peter 2_Peter 1_John 2_John 3_John Jude "
    "Revelation"
)
BOOKS = [name.replace("_", " ") for name in BOOK_NAMES.split()]
NOVEL_CHAPTERS = {
    "Emma": 55,
    "Mansfield Park": 48,
    "Northanger Abbey": 31,
    "Persuasion": 24,
    "Pride and Prejudice": 61,
    "Sense and Sensibility": 50,
}
BIBLE_CHAPTERS, BIBLE_VERSES, PSALMS = 1189, 31102, 150


@dataclass(frozen=True)
class Document:
    """One chapter, psalm or preface. `text` starts with a heading line that names its source."""

    source: str
    name: str
    text: str


def read_r_strings(blob: bytes) -> list[str]:
    """Strings of one serialized R character vector (XDR format, version 3). Raises ValueError for anything else."""
    if blob[:2] != b"X\n" or struct.unpack(">i", blob[2:6]) != (3,):
        raise ValueError(f"expected an XDR serialization of version 3, got {blob[:6]!r}")
    (encoding_bytes,) = struct.unpack(">i", blob[14:18])
    position = 18 + encoding_bytes
    flags, count = struct.unpack(">ii", blob[position : position + 8])
    if flags & 0xFF != 16:
        raise ValueError(f"expected a character vector (type 16), got type {flags & 0xFF}")
    position += 8
    strings = []
    for _ in range(count):
        _, length = struct.unpack(">ii", blob[position : position + 8])
        strings.append(blob[position + 8 : position + 8 + length].decode("utf-8"))
        position += 8 + length
    if position != len(blob):
        raise ValueError(f"{len(blob) - position} bytes left after {count} strings")
    return strings


def read_rdb(data: bytes) -> Iterator[list[str]]:
    """Character vectors of an R lazy-load database: records of a big-endian size and a zlib stream, back to back."""
    while data:
        (size,) = struct.unpack(">i", data[:4])
        stream = zlib.decompressobj()
        blob = stream.decompress(data[4:])
        if len(blob) != size:
            raise ValueError(f"R record holds {len(blob)} bytes, its header says {size}")
        yield read_r_strings(blob)
        data = stream.unused_data


def unwrap(lines: list[str]) -> str:
    """Hard-wrapped lines to paragraphs of one line each; indented lines (verse, letter heads) keep their breaks."""
    text = ""
    for line in lines:
        body = re.sub(r"\s+", " ", line.replace("_", "")).strip()
        if not body:
            text = text.rstrip("\n") + "\n\n"
        elif not text or text.endswith("\n"):
            text += body
        elif line.startswith("  "):
            text += "\n" + body
        else:
            text += ("" if text.endswith("-") else " ") + body
    return text.strip()


def austen_documents(path: Path = AUSTEN_RDB) -> Iterator[Document]:
    """The chapters of the six novels. Volume headings, editors' notes, footnotes and rules of asterisks are dropped."""
    heading = re.compile(r"\s*chapter ([ivxl]+|\d+)\s*", re.IGNORECASE)
    editorial = re.compile(r"\s*(\[(At this point|End volume)|VOLUME |FINIS|THE END|Finis|\*Vide|[* ]+$)")
    for lines in read_rdb(path.read_bytes()):
        title = next(line.strip() for line in lines if line.strip()).title().replace(" And ", " and ")
        if "A NOTE ON THE TEXT" in lines:  # a modern publisher's note, not Austen's
            lines = lines[: lines.index("A NOTE ON THE TEXT")]
        starts = [i for i, line in enumerate(lines) if heading.fullmatch(line)]
        if len(starts) != NOVEL_CHAPTERS[title]:
            raise ValueError(f"{title}: found {len(starts)} chapters, expected {NOVEL_CHAPTERS[title]}")
        for number, (start, end) in enumerate(zip(starts, [*starts[1:], len(lines)], strict=True), 1):
            body = [line for line in lines[start + 1 : end] if not editorial.match(line) or not line.strip()]
            text = unwrap(body).replace("love is declared,*", "love is declared,")
            heading_line = f"{title.upper()}, by Jane Austen. Chapter {number}"
            yield Document("austen", f"{title} {number}", f"{heading_line}\n\n{text}\n")


def bible_documents(output: str | None = None) -> Iterator[Document]:
    """The chapters of the King James Bible, one verse a line, from the `bible` program's output."""
    if output is None:
        command = ["bible", "-f", "gen1:1-rev22:21"]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    chapters: dict[tuple[str, str], list[str]] = {}
    for line in output.splitlines():
        match = re.fullmatch(r"(\d?[A-Za-z]+)(\d+):(\d+) (\S.*)", line)
        if match is None:
            raise ValueError(f"not a verse: {line!r}")
        book, chapter, verse, text = match.groups()
        verses = chapters.setdefault((book, chapter), [])
        verses.append(re.sub(r"\s+", " ", text).strip())
        if int(verse) != len(verses):
            raise ValueError(f"{book} {chapter}: verse {verse} follows verse {len(verses) - 1}")
    names = dict(zip(dict.fromkeys(book for book, _ in chapters), BOOKS, strict=True))
    for (book, chapter), verses in chapters.items():
        name = f"{names[book]} {chapter}"
        yield Document("kjv", name, f"THE KING JAMES BIBLE. {name}\n\n" + "\n".join(verses) + "\n")


def sword_blocks(stem: Path, kind: str) -> Iterator[str]:
    """Decompressed blocks of a SWORD module. The index holds (offset, size, unpacked size), little-endian uint32."""
    index, data = Path(f"{stem}.{kind}s").read_bytes(), Path(f"{stem}.{kind}z").read_bytes()
    for offset, size, unpacked in struct.iter_unpack("<III", index):
        block = zlib.decompress(data[offset : offset + size])
        if len(block) != unpacked:
            raise ValueError(f"{stem.name}: block at {offset} holds {len(block)} bytes, its index says {unpacked}")
        yield block.decode("utf-8")


def plain_text(osis: str) -> str:
    """OSIS markup to paragraphs: block elements end a paragraph, verse lines a line, inline elements vanish."""
    text = re.sub(r"\s+", " ", osis)
    text = re.sub(r"</?(div|title|chapter|milestone|list|lg|table)\b[^>]*>", "\n\n", text)
    text = re.sub(r"</?(l|item|row)\b[^>]*>", "\n", text)
    text = re.sub(r"</cell>", " ", text)
    text = re.sub(r"</?(hi|reference|cell)\b[^>]*>", "", text)
    if "<" in text:
        raise ValueError(f"unknown markup: {text[text.index('<') :][:60]!r}")
    text = html.unescape(text)
    # A few letters of the Treasury were left in the DOS code page 437.
    text = re.sub("[\x80-\x9f]", lambda match: bytes([ord(match[0])]).decode("cp437"), text)
    text = unicodedata.normalize("NFC", text.replace("\ufeff", "").replace("\u202f", " ").replace("\xa0", " "))
    # Leftovers of older markup: list bullets, rules and links of asterisks, "#" before a verse, "{1}" for a footnote.
    text = re.sub(r"Continued\.\.\.See Psalms \"Job 42:15\"|[•*]|#(?=\()|\{\d+\}", "", text).replace("`", "'")
    paragraphs = (
        "\n".join(line for line in (re.sub(r" +", " ", line).strip() for line in paragraph.split("\n")) if line)
        for paragraph in text.split("\n\n")
    )
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph)


def commentary_documents(source: str, heading: str, parts: tuple[str, ...], kind: str) -> Iterator[Document]:
    """Chapters of a commentary, named by the OSIS ids of their chapter elements; a book's preface joins chapter 0."""
    osis = "".join(block for part in parts for block in sword_blocks(SWORD_COMMENTS / source / part, kind))
    pieces = re.split(r'<chapter n="\d+" osisID="([^"]+)" sID="[^"]+"/>', osis)
    preface = plain_text(pieces[0])
    if preface:
        yield Document(source, "Preface", f"{heading}. Preface\n\n{preface}\n")
    order = dict.fromkeys(name.split(".")[0] for name in pieces[1::2])
    names = dict(zip(order, BOOKS, strict=True)) if len(order) == len(BOOKS) else {"Ps": "Psalm"}
    for osis_id, body in zip(pieces[1::2], pieces[2::2], strict=True):
        book, chapter = osis_id.split(".")
        name = f"{names[book]} {chapter}"
        yield Document(source, name, f"{heading}. {name}\n\n{plain_text(body)}\n")


def check(documents: list[Document]) -> None:
    """Raise ValueError unless every source is complete, free of markup and free of control characters."""
    expected = {
        "austen": sum(NOVEL_CHAPTERS.values()),
        "kjv": BIBLE_CHAPTERS,
        "tdavid": PSALMS + 1,
        "mhcc": BIBLE_CHAPTERS,
    }
    markup = re.compile(r"<[a-zA-Z/]|[#*`_•]|&(?:amp|lt|gt|quot|apos|#\d+);|[\x00-\x09\x0b-\x1f\x7f-\x9f\ufffd]")
    problems = []
    for source, count in expected.items():
        found = [document for document in documents if document.source == source]
        if len(found) != count or len({document.name for document in found}) != count:
            problems.append(f"{source}: {len(found)} documents, expected {count} of distinct names")
        for document in found:
            stray = markup.search(document.text)
            if stray:
                problems.append(f"{source} {document.name}: stray {document.text[stray.start() :][:20]!r}")
            if len(document.text.split("\n\n", 1)[1]) < 40:
                problems.append(f"{source} {document.name}: no text")
    verses = sum(document.text.count("\n") - 2 for document in documents if document.source == "kjv")
    if verses != BIBLE_VERSES:
        problems.append(f"kjv: {verses} verses, expected {BIBLE_VERSES}")
    if problems:
        raise ValueError("the corpus is not what was expected:\n" + "\n".join(problems))


def split(documents: list[Document], share: float = HELD_OUT_SHARE) -> tuple[list[Document], list[Document]]:
    """(training, held-out): per source, documents in the order of a hash are held out up to `share` of the bytes."""
    held_out: set[tuple[str, str]] = set()
    for source in dict.fromkeys(document.source for document in documents):
        own = [document for document in documents if document.source == source]
        own.sort(key=lambda document: hashlib.sha256(f"{document.source}/{document.name}".encode()).digest())
        budget = share * sum(len(document.text.encode()) for document in own)
        for document in own:
            size = len(document.text.encode())
            if size <= budget:
                held_out.add((document.source, document.name))
                budget -= size
    train = [document for document in documents if (document.source, document.name) not in held_out]
    return train, [document for document in documents if (document.source, document.name) in held_out]


def read_documents(path: Path) -> list[Document]:
    """The documents of one `.jsonl` file."""
    return [Document(**json.loads(line)) for line in path.read_text("utf-8").splitlines()]


def describe(documents: list[Document]) -> dict[str, dict[str, int | str | list[str]]]:
    """Per source: documents, bytes, SHA-256 of the texts in order."""
    summary: dict[str, dict[str, int | str | list[str]]] = {}
    for source in dict.fromkeys(document.source for document in documents):
        texts = [document.text.encode() for document in documents if document.source == source]
        digest = hashlib.sha256(b"".join(texts)).hexdigest()
        summary[source] = {"documents": len(texts), "bytes": sum(map(len, texts)), "sha256": digest}
    return summary


def extract(console: Console) -> list[Document]:
    """All documents of all sources, checked."""
    readers = (
        ("Jane Austen's novels", austen_documents),
        ("the King James Bible", bible_documents),
        (
            "the Treasury of David",
            lambda: commentary_documents("tdavid", "THE TREASURY OF DAVID, by C. H. Spurgeon", ("ot",), "cz"),
        ),
        (
            "Matthew Henry's commentary",
            lambda: commentary_documents("mhcc", "MATTHEW HENRY'S CONCISE COMMENTARY", ("ot", "nt"), "bz"),
        ),
    )
    documents: list[Document] = []
    for label, reader in readers:
        documents += track(reader(), description=f"{label:28}", console=console)
    check(documents)
    return documents


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder for train.jsonl, heldout.jsonl and manifest.json")
    out: Path = parser.parse_args().out
    console = Console(stderr=True)
    documents = extract(console)
    out.mkdir(parents=True, exist_ok=True)
    manifest = {}
    for part, chosen in zip(("train", "heldout"), split(documents), strict=True):
        lines = "".join(json.dumps(asdict(document), ensure_ascii=False) + "\n" for document in chosen)
        (out / f"{part}.jsonl").write_text(lines, "utf-8")
        manifest[part] = describe(chosen)
        if part == "heldout":
            for source, summary in manifest[part].items():
                summary["names"] = [document.name for document in chosen if document.source == source]
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n", "utf-8")
    console.print_json(data=manifest)


if __name__ == "__main__":
    main()
