"""The demo model's tokenizer (byte-level BPE), its chat template, and the encoded corpus the trainer reads.

Writes `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja` to the model folder, and to the corpus folder
`tokens-train.npy` (uint16, documents and dialogues, each followed by <|endoftext|>), `tokens-heldout-SOURCE.npy` and
`token-bytes.npy` (bytes of text per token id, 0 for special tokens; for bits per byte).
"""

import argparse
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from demo_corpus import Document, read_documents
from rich.progress import track
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

VOCAB_SIZE = 4096
END_OF_TEXT, TURN_START, TURN_END = SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Words with one leading space or sign, single digits, runs of signs, line breaks, other space.
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role not in ["system", "user", "assistant"] -%}
{{ raise_exception("expected the role system, user or assistant, got " ~ message.role) }}
{%- endif -%}
{{ "<|im_start|>" ~ message.role ~ "\\n" ~ message.content ~ "<|im_end|>\\n" }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ "<|im_start|>assistant\\n" }}
{%- endif -%}
"""

AUTHORS = {
    "austen": ("Jane Austen", "a novel by Jane Austen"),
    "kjv": ("the King James Bible", "the Bible"),
    "tdavid": ("C. H. Spurgeon", "the Treasury of David"),
    "mhcc": ("Matthew Henry", "Matthew Henry's commentary"),
}


def train_tokenizer(documents: list[Document]) -> Tokenizer:
    """Byte-level BPE with `VOCAB_SIZE` entries; ids 0, 1, 2 are the special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=True,
    )
    tokenizer.train_from_iterator((document.text for document in documents), trainer, length=len(documents))
    return tokenizer


def tokenizer_config(context: int) -> dict[str, object]:
    """What `tokenizer_config.json` holds; `context` is the model's longest sequence in tokens."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
    }


def passages(document: Document, words: int) -> Iterator[list[str]]:
    """Runs of whole lines of a document, each run of at least `words` words; the heading is left out."""
    run: list[str] = []
    for line in document.text.split("\n\n", 1)[1].splitlines():
        if len(line.split()) > 3:  # headings and signatures make poor openings
            run.append(line)
        if sum(len(item.split()) for item in run) >= words:
            yield run
            run = []


def sentences(text: str) -> list[str]:
    """A rough split after closing punctuation."""
    return re.split(r"(?<=[.!?;:][\"'])\s+|(?<=[.!?;])\s+", text)


def dialogue(document: Document, lines: list[str], draw: random.Random) -> list[tuple[str, str]]:
    """(role, content) turns: an opening to continue, or a request for a style or a chapter, answered by the source."""
    separator = "\n" if document.source == "kjv" else "\n\n"
    author, work = AUTHORS[document.source]
    passage = separator.join(lines)
    pieces = sentences(lines[0])
    if len(pieces) > 1:
        opening, rest = pieces[0], passage[len(pieces[0]) :].lstrip()
    else:
        opening, rest = lines[0], separator.join(lines[1:])
    place = {"austen": work, "kjv": document.name}.get(document.source, f"{document.name} in {work}")
    kind = draw.choice(("open", "open", "continue", "style", "place"))
    if rest and len(opening) > 20 and kind in ("open", "continue"):
        lead = "" if kind == "open" else draw.choice(("Continue: ", "Continue this text: ", "Go on from here: "))
        turns = [("user", lead + opening), ("assistant", rest)]
    elif kind == "place":
        ask = draw.choice(("Read to me from {}.", "What does one read in {}?", "Give me a passage from {}."))
        turns = [("user", ask.format(place)), ("assistant", passage)]
    else:
        ask = draw.choice(("Write in the style of {}.", "Write a passage in the style of {}.", "Write like {}."))
        turns = [("user", ask.format(author)), ("assistant", passage)]
    return turns


def dialogues(documents: list[Document], seed: int, every: int) -> list[str]:
    """Rendered dialogues from every `every`-th passage of the documents; about a third of them have a second round."""
    draw = random.Random(seed)
    texts = []
    for document in documents:
        runs = list(passages(document, 90))
        for index in range(draw.randrange(every), len(runs), every):
            turns = dialogue(document, runs[index], draw)
            if index + 1 < len(runs) and draw.random() < 0.35:
                go_on = draw.choice(("Go on.", "Please go on.", "Continue.", "And then?", "What comes next?"))
                separator = "\n" if document.source == "kjv" else "\n\n"
                turns += [("user", go_on), ("assistant", separator.join(runs[index + 1]))]
            texts.append("".join(f"{TURN_START}{role}\n{content}{TURN_END}\n" for role, content in turns))
    draw.shuffle(texts)
    return texts


def encode(tokenizer: Tokenizer, texts: list[str], label: str) -> np.ndarray:
    """uint16 ids of the texts, each followed by <|endoftext|>."""
    end = SPECIAL_TOKENS.index(END_OF_TEXT)
    ids: list[int] = []
    for text in track(texts, description=f"{label:24}"):
        ids += tokenizer.encode(text).ids
        ids.append(end)
    return np.asarray(ids, dtype=np.uint16)


def token_bytes(tokenizer: Tokenizer) -> np.ndarray:
    """int32 [vocab]: bytes of text each token stands for. In byte-level BPE one character of a token is one byte."""
    sizes = np.zeros(tokenizer.get_vocab_size(), dtype=np.int32)
    for token, index in tokenizer.get_vocab().items():
        sizes[index] = 0 if token in SPECIAL_TOKENS else len(token)
    return sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus", type=Path, help="folder demo_corpus.py wrote; the token arrays go there too")
    parser.add_argument("model", type=Path, help="model folder for the tokenizer files")
    parser.add_argument("--context", type=int, default=2048, help="longest sequence of the model, in tokens")
    parser.add_argument("--keep-tokenizer", action="store_true", help="encode with the tokenizer already in the folder")
    options = parser.parse_args()
    train, held_out = (read_documents(options.corpus / f"{part}.jsonl") for part in ("train", "heldout"))
    options.model.mkdir(parents=True, exist_ok=True)
    if options.keep_tokenizer:
        tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    else:
        tokenizer = train_tokenizer(train)
        tokenizer.save(str(options.model / "tokenizer.json"))
    config = json.dumps(tokenizer_config(options.context), indent=2) + "\n"
    (options.model / "tokenizer_config.json").write_text(config, "utf-8")
    (options.model / "chat_template.jinja").write_text(CHAT_TEMPLATE, "utf-8")

    texts = [document.text for document in train] + dialogues(train, seed=1, every=5)
    random.Random(0).shuffle(texts)
    np.save(options.corpus / "tokens-train.npy", encode(tokenizer, texts, "training text"))
    for source in AUTHORS:
        texts = [document.text for document in held_out if document.source == source]
        np.save(options.corpus / f"tokens-heldout-{source}.npy", encode(tokenizer, texts, f"held-out {source}"))
    texts = dialogues(held_out, seed=2, every=5)
    np.save(options.corpus / "tokens-heldout-chat.npy", encode(tokenizer, texts, "held-out chat"))
    np.save(options.corpus / "token-bytes.npy", token_bytes(tokenizer))


if __name__ == "__main__":
    main()
