"""From token ids to text as they come: whole characters only, and never past a stop string.

The deltas of one sequence, joined, are `Tokenizer.decode` of all its ids, cut at the stop string. What is held back is
bounded: at most three bytes of an unfinished character, and as many characters as a stop string has.
"""

import codecs
import re
from collections.abc import Sequence

from deltagram.engine.tokenizer import Tokenizer


class Detokenizer:
    """The text of one sequence.

    stop: strings that end it, found wherever they lie in the text, whatever tokens it came in: the first one completed
    counts. The text is cut before it, or after it with `include_stop`. Once `stopped` is true nothing may be pushed.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._text = _ByteText(tokenizer) if tokenizer.is_byte_level else _WindowText(tokenizer)
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._held = ""
        self.stopped = False

    def push(self, token_id: int, *, look_for_stop: bool = True) -> str:
        """The text that this id makes certain. Without `look_for_stop` it is shown at once and stop strings in it do
        not count, nor those that begin in it."""
        assert not self.stopped, "the sequence has ended"
        if token_id in self._skipped:
            return ""
        delta = self._text.push(token_id)
        return self._search(delta) if look_for_stop else delta

    def flush(self) -> str:
        """The rest of the text, when no more ids come; U+FFFD stands for an unfinished character."""
        if self.stopped:
            return ""
        delta = self._search(self._text.finish())
        delta, self._held = delta + self._held, ""
        return delta

    def _search(self, delta: str) -> str:
        """Takes new text; gives what may be shown of the text so far."""
        if not self._stop:
            return delta
        text = self._held + delta
        found = [(start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            end, start = min(found)
            return text[: end if self._include_stop else start]
        shown = len(text) - max(_overlap(text, stop) for stop in self._stop)
        self._held = text[shown:]
        return text[:shown]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` may be the beginning of `stop`, which is not in it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class _ByteText:
    """For byte-level tokenizers, where a text is that of its tokens' bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token = tokenizer.backend.id_to_token
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        token = self._token(token_id)
        return "" if token is None else self._decoder.decode(token_bytes(token))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


def _byte_alphabet() -> dict[str, int]:
    """The characters that stand for bytes in byte-level vocabularies (GPT-2, 2019): printable Latin-1 characters stand
    for themselves, the other bytes in order for the characters from U+0100."""
    themselves = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in themselves]
    return {chr(b): b for b in themselves} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTES = _byte_alphabet()


def token_bytes(token: str) -> bytes:
    """The bytes of a token of a byte-level vocabulary. A token with any other character is meant as it stands."""
    try:
        return bytes([_BYTES[character] for character in token])
    except KeyError:
        return token.encode("utf-8")


class _WindowText:
    """For all other tokenizers, whose text of a token depends on its neighbours (leading spaces, word pieces).

    Decodes a window: the tokens of the last delta, as context, and those since. Of these tokenizers only those with
    byte tokens (<0xE2>) can have unfinished characters, and only in a run of such tokens. If such a run
    is no valid UTF-8 the tokenizer makes U+FFFD of each of its bytes, also of characters that have been shown by then:
    the only case in which the deltas are not the text of all ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._context = 0  # how many tokens of the window are context
        self._shown = 0  # how many characters of the window's text are
        self._run = b""

    def push(self, token_id: int) -> str:
        token = self._tokenizer.backend.id_to_token(token_id)
        if token is None:
            return ""
        self._window.append(token_id)
        byte = re.fullmatch("<0x([0-9A-F]{2})>", token)
        self._run = self._run + bytes.fromhex(byte[1]) if byte else b""
        try:
            self._run.decode("utf-8")
            valid = True
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data":
                return ""
            valid = False
        text = self._decode()
        delta = text[self._shown :]
        self._shown = len(text)
        if valid and delta:
            self._window = self._window[self._context :]
            self._context = len(self._window)
            self._shown = len(self._decode())
        return delta

    def finish(self) -> str:
        return self._decode()[self._shown :]

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=False)
