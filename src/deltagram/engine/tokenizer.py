"""A checkpoint's tokenizer: text to token ids and back, its end tokens and its chat template."""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from deltagram.engine.chat_template import ChatTemplate


class Tokenizer:
    """Made by `load`; the arguments are what it read.

    eos_token_ids: the ids that end a text, those of generation_config.json first.
    model_vocab_size: `encode` gives no id at or above it.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: tuple[int, ...] = (),
        chat_template: ChatTemplate | None = None,
        model_vocab_size: int | None = None,
    ) -> None:
        backend.no_truncation()  # tokenizer.json may carry the settings of a training run
        backend.no_padding()
        self.backend = backend
        self.eos_token_ids = eos_token_ids
        self.chat_template = chat_template
        self.model_vocab_size = model_vocab_size
        self.special_ids = frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)

    @staticmethod
    def load(folder: str | Path, *, model_vocab_size: int | None = None) -> "Tokenizer":
        """Reads tokenizer.json, and if present tokenizer_config.json, chat_template.jinja (or chat_template.json),
        generation_config.json and config.json. Raises ValueError naming the file that is missing or unreadable."""
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{folder} must hold a tokenizer.json (the fast format of Hugging Face), found none")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises plain Exception
            raise ValueError(f"{path} is not a readable tokenizer: {error}") from error
        config = _read_json(folder / "tokenizer_config.json")
        special_tokens = _special_tokens(config)
        template = _chat_template(folder, config)
        return Tokenizer(
            backend,
            eos_token_ids=_eos_token_ids(folder, backend.token_to_id(special_tokens.get("eos_token", ""))),
            chat_template=None if template is None else ChatTemplate(template, special_tokens),
            model_vocab_size=model_vocab_size,
        )

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def is_byte_level(self) -> bool:
        """True if a text is the UTF-8 text of its tokens' bytes, one after the other."""
        decoder = json.loads(self.backend.to_str())["decoder"] or {}
        parts = decoder.get("decoders", [decoder])
        return [part.get("type") for part in parts] == ["ByteLevel"]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Special tokens spelled out in the text become their ids. `add_special_tokens` adds those that the tokenizer
        puts around a text, if it has any; a rendered chat template already holds them.

        Raises ValueError for text that is no Unicode text, and if the tokenizer gives an id that the model lacks.
        """
        if not isinstance(text, str):
            raise ValueError(f"text must be a string, got {text!r:.200}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"text must be valid Unicode, got the lone surrogate U+{ord(text[error.start]):04X} "
                f"at character {error.start}"
            ) from None
        # Of the backend's ways this one lets other threads run meanwhile.
        ids = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        if self.model_vocab_size is not None and ids and (largest := max(ids)) >= self.model_vocab_size:
            raise ValueError(
                f"text must use tokens of the model's vocabulary of {self.model_vocab_size}, "
                f"got token {self.backend.id_to_token(largest)!r} with id {largest}"
            )
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Ids without a token (a model's vocabulary is often padded) give no text."""
        # As with encoding, this way of the backend's lets other threads run.
        return self.backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)[0]

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt for these messages; encode it with `add_special_tokens=False`. See `ChatTemplate.render`."""
        if self.chat_template is None:
            raise ValueError("this model has no chat template (chat_template.jinja, or one in tokenizer_config.json)")
        return self.chat_template.render(messages, add_generation_prompt=add_generation_prompt, **variables)


def _read_json(path: Path) -> dict[str, Any]:
    """The object in the file, {} if there is no file."""
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {value!r:.200}")
    return value


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Entries such as "eos_token": a string, or an object with its text under "content"."""
    texts = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in config.items()
        if name.endswith("_token")
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """The file chat_template.jinja comes first; a list of named templates means the one named "default"."""
    if (path := folder / "chat_template.jinja").exists():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        if "default" not in named:
            raise ValueError(f'chat_template must have one named "default", got {sorted(named)}')
        return str(named["default"])
    if template is not None and not isinstance(template, str):
        raise ValueError(f"chat_template must be a string or a list of named templates, got {template!r:.200}")
    return template


def _eos_token_ids(folder: Path, tokenizer_eos: int | None) -> tuple[int, ...]:
    """Those of generation_config.json, or else of config.json, and the tokenizer's own (which ends a chat's turn)."""
    config = _read_json(folder / "config.json")
    for values in (_read_json(folder / "generation_config.json"), config, config.get("text_config") or {}):
        ids = values.get("eos_token_id")
        if ids is not None:
            break
    found: Iterable[Any] = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in found):
        raise ValueError(f"eos_token_id in {folder} must be a token id or a list of them, got {ids!r}")
    return tuple(dict.fromkeys([*found, *([] if tokenizer_eos is None else [tokenizer_eos])]))
