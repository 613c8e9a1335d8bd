"""What the server answers with: OpenAI's objects for completions and chat, whole and in chunks."""

import math
import time
import uuid
from collections.abc import Sequence
from typing import Any

from deltagram.engine.detokenizer import token_bytes
from deltagram.engine.tokenizer import Tokenizer
from deltagram.serving.engine_process import Piece

Object = dict[str, Any]
MIN_LOGPROB = -9999.0  # JSON has no infinities and no NaN


class Answer:
    """The objects that answer one request; `usage` counts what passed through `choice`."""

    prefix: str
    whole: str  # the value of `object` in a whole answer
    part: str  # and in a chunk

    def __init__(self, model: str, tokenizer: Tokenizer, prompt_tokens: int) -> None:
        self.head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self.tokenizer, self.prompt_tokens, self.completion_tokens = tokenizer, prompt_tokens, 0

    def choice(self, piece: Piece, chunk: bool) -> Object:
        """A choice of a whole answer, or of a chunk."""
        self.completion_tokens += len(piece.token_ids)
        logprobs = self._logprobs(piece) if piece.logprobs is not None else None
        content = self._content(piece, chunk)
        return {"index": piece.index, **content, "logprobs": logprobs, "finish_reason": piece.finish_reason}

    def body(self, choices: Sequence[Object]) -> Object:
        return {**self.head, "object": self.whole, "choices": choices, "usage": self.usage()}

    def chunk(self, choices: Sequence[Object], usage: bool | None) -> Object:
        """usage: True tells it, None is for a stream that tells it elsewhere, False for one that never does."""
        chunk = {**self.head, "object": self.part, "choices": choices}
        return chunk if usage is False else {**chunk, "usage": self.usage() if usage else None}

    def usage(self) -> Object:
        done, asked = self.completion_tokens, self.prompt_tokens
        return {"prompt_tokens": asked, "completion_tokens": done, "total_tokens": asked + done}

    def opening(self, count: int) -> list[Object]:
        """Choices of chunks that come before any text."""
        return []

    def _content(self, piece: Piece, chunk: bool) -> Object:
        raise NotImplementedError

    def _logprobs(self, piece: Piece) -> Object:
        raise NotImplementedError

    def _bytes(self, token: int) -> bytes:
        text = self.tokenizer.backend.id_to_token(token)
        if text is None:
            return b""
        if self.tokenizer.is_byte_level:
            return token_bytes(text)
        return self.tokenizer.decode([token], skip_special_tokens=False).encode()


class CompletionAnswer(Answer):
    prefix, whole, part = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, tokenizer: Tokenizer, prompt_tokens: int) -> None:
        super().__init__(model, tokenizer, prompt_tokens)
        self._offsets: dict[int, int] = {}

    def _content(self, piece: Piece, chunk: bool) -> Object:
        return {"text": piece.text}

    def _logprobs(self, piece: Piece) -> Object:
        """Tokens that are no text of their own are spelled `bytes:\\xe2\\x80`. Offsets are in characters of tokens."""
        assert piece.logprobs is not None
        tokens = [self._spelled(token) for token, _, _ in piece.logprobs]
        offsets, offset = [], self._offsets.get(piece.index, 0)
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        self._offsets[piece.index] = offset
        return {
            "tokens": tokens,
            "token_logprobs": [_finite(logprob) for _, logprob, _ in piece.logprobs],
            "top_logprobs": [{self._spelled(t): _finite(value) for t, value in top} for _, _, top in piece.logprobs],
            "text_offset": offsets,
        }

    def _spelled(self, token: int) -> str:
        raw = self._bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class ChatAnswer(Answer):
    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self, count: int) -> list[Object]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": i, "delta": delta, "logprobs": None, "finish_reason": None} for i in range(count)]

    def _content(self, piece: Piece, chunk: bool) -> Object:
        if chunk:
            return {"delta": {"content": piece.text} if piece.text else {}}
        return {"message": {"role": "assistant", "content": piece.text, "refusal": None}}

    def _logprobs(self, piece: Piece) -> Object:
        assert piece.logprobs is not None
        content = [
            self._entry(token, logprob) | {"top_logprobs": [self._entry(*alternative) for alternative in top]}
            for token, logprob, top in piece.logprobs
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> Object:
        raw = self._bytes(token)
        return {"token": raw.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(raw)}


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else MIN_LOGPROB
