"""DeepSeek's token map: ids of tokens that read alike become one id before they are hashed.

The map is a function of the tokenizer alone. The number of its ids is a constant of the model, from which every
multiplier derives: engram_specs refuses a map with another.
"""

from pathlib import Path

from tokenizers import Regex, Tokenizer, normalizers

_LONE_SPACE = "\ue000"  # stands for a text that is one space while texts are stripped


def token_map(tokenizer: Tokenizer) -> list[int]:
    """The compressed id of each id of `tokenizer`, numbered in the order in which their texts are first seen.

    A token's text is what it decodes to alone, special tokens as themselves, in compatibility form, without accents, in
    lower case, with runs of blanks as one space and none at its ends; a single space stays one, and a text that
    vanishes stays as it was. A token that is no whole text (it decodes to U+FFFD) is known by its own raw form. Source:
    DeepSeek-V4.1's published rules.
    """
    blanks = normalizers.Replace(Regex(r"[ \t\r\n]+"), " ")
    hide, show = normalizers.Replace(Regex(r"^ $"), _LONE_SPACE), normalizers.Replace(_LONE_SPACE, " ")
    plain = [normalizers.NFKC(), normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()]
    normalize = normalizers.Sequence([*plain, blanks, hide, normalizers.Strip(), show]).normalize_str
    numbers: dict[str | None, int] = {}
    mapped = []
    for token in range(tokenizer.get_vocab_size(with_added_tokens=True)):
        text = tokenizer.decode([token], skip_special_tokens=False)
        key = tokenizer.id_to_token(token) if "\ufffd" in text else normalize(text) or text
        mapped.append(numbers.setdefault(key, len(numbers)))
    return mapped


def read_token_map(folder: Path) -> list[int]:
    """The map of a checkpoint's tokenizer.json. Raises ValueError where there is none."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ValueError(f"{file} does not exist; the n-gram memory hashes ids that derive from it")
    return token_map(Tokenizer.from_file(str(file)))
