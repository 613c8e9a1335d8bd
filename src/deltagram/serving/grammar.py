"""Structured output: what a JSON schema or a regex lets a model say, as a mask over the vocabulary for each token.

The automata are llguidance's, which runs in time linear in the text and within limits of its own. Here is what it is
asked, and what is refused before: a schema that is too large or deep, that refers to itself or to anything outside,
and a regex that repeats a repetition.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from pydantic_core import to_json

from deltagram.engine.tokenizer import Tokenizer
from deltagram.serving.limits import Limits

_LIMITS = LLParserLimits(step_lexer_fuel=50_000, verbose_errors=False)
_JSON: Any = {"whitespace_pattern": " ?", "lenient": False}  # or a small model never stops indenting
MAX_ERROR = 500  # characters of a message of llguidance, which quotes the grammar


class GrammarError(ValueError):
    """A schema or regex that cannot be followed; the message is for its client."""


class Grammars:
    """Makes the constraints of a model whose logits have `vocab_size` entries; `end_token_ids`, at least one, end a
    text."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_token_ids: tuple[int, ...]) -> None:
        self.vocab_size = vocab_size
        backend = tokenizer.backend.to_str()
        most = max(vocab_size, tokenizer.vocab_size)  # a tokenizer may have tokens that the model lacks
        self._tokenizer = LLTokenizer(backend, n_vocab=most, eos_token=list(end_token_ids))

    def constraint(self, source: Mapping[str, Any]) -> "GrammarConstraint":
        """The constraint of a `source`: {"schema": ...} or {"regex": ...}. Other threads run while it compiles.

        Raises GrammarError for what llguidance refuses.
        """
        matcher = LLMatcher(self._tokenizer, _grammar(source), log_level=0, limits=_LIMITS)
        return GrammarConstraint(matcher, self.vocab_size)


class GrammarConstraint:
    """One sequence's place in a grammar: see engine/request.py: Constraint."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size
        self.allowed = self._mask()
        if self.finished:
            raise GrammarError("the schema or regex allows no text at all")

    @property
    def finished(self) -> bool:
        return self._matcher.is_stopped()

    def accept(self, token: int) -> None:
        self._matcher.consume_token(token)
        if not self.finished:
            self.allowed = self._mask()
        self._check()

    def _mask(self) -> np.ndarray:
        bits = self._matcher.compute_bitmask() if not self._matcher.is_error() else b""
        self._check()
        mask = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")[: self._vocab_size].astype(bool)
        if not mask.any():
            raise GrammarError("the schema or regex needs a token that the model lacks")
        return mask

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(f"the schema or regex cannot be followed: {self._matcher.get_error()[:MAX_ERROR]}")


def _grammar(source: Mapping[str, Any]) -> str:
    if "regex" in source:
        return LLMatcher.grammar_from_regex(source["regex"])
    return LLMatcher.grammar_from_json_schema(json.dumps(source["schema"]), overrides=_JSON)


def check_regex(pattern: str, limits: Limits) -> None:
    """Raises ValueError for a pattern that is too long or repeats a repetition."""
    if not pattern:
        raise ValueError("regex must not be empty")
    if len(pattern.encode()) > limits.max_schema_bytes:
        raise ValueError(f"regex must have at most {limits.max_schema_bytes} bytes, got {len(pattern.encode())}")
    _refuse_nested_repetition(pattern, "regex")


def check_schema(schema: Any, limits: Limits) -> None:
    """Raises ValueError for a schema of another type, too large or too deep, with a reference that is not to its own
    `#/...` or that leads back to itself, or with a pattern that `check_regex` refuses."""
    if not isinstance(schema, dict):
        raise ValueError(f"schema must be a JSON object, got {type(schema).__name__}")
    if (depth := _depth(schema)) > limits.max_schema_depth:
        raise ValueError(f"schema must be nested at most {limits.max_schema_depth} deep, got {depth}")
    if (size := len(to_json(schema))) > limits.max_schema_bytes:
        raise ValueError(f"schema must have at most {limits.max_schema_bytes} bytes, got {size}")
    _check_references(schema)
    for part in _parts(schema):
        if isinstance(pattern := part.get("pattern"), str):
            _refuse_nested_repetition(pattern, "pattern")


def _depth(value: Any) -> int:
    """Levels of objects and arrays, counted without recursion."""
    depth, level = 0, [value]
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        level = [child for item in level for child in (item.values() if isinstance(item, dict) else item)]
    return depth


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    """Every object in the schema, itself included."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            yield part
        if isinstance(part, dict | list):
            waiting.extend(part.values() if isinstance(part, dict) else part)


def _check_references(schema: dict[str, Any]) -> None:
    done: set[str] = set()
    path: list[str] = []  # of references that are being followed

    def follow(part: Any) -> None:
        for inner in _parts(part):
            reference = inner.get("$ref")
            if reference is None or isinstance(reference, dict):  # a property that is called $ref
                continue
            if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
                raise ValueError(f"$ref must point into its own schema (#/...), got {reference!r:.200}")
            if reference in path or reference == "#":
                raise ValueError(f"a schema must not refer to itself, got {reference!r:.200}")
            if reference not in done:
                if len(path) >= MAX_REFERENCES:
                    raise ValueError(f"references must lead on at most {MAX_REFERENCES} times, got more")
                path.append(reference)
                follow(_resolve(schema, reference))
                done.add(path.pop())

    follow(schema)


MAX_REFERENCES = 100  # one after the other


def _resolve(schema: dict[str, Any], reference: str) -> Any:
    part: Any = schema
    for key in reference[2:].split("/"):
        key = key.replace("~1", "/").replace("~0", "~")
        if isinstance(part, list) and re.fullmatch("[0-9]{1,6}", key) and int(key) < len(part):
            part = part[int(key)]
        elif isinstance(part, dict) and key in part:
            part = part[key]
        else:
            raise ValueError(f"$ref must point to a part of the schema, got {reference!r:.200}")
    return part


_ATOM = r"(?:\\.|\[(?:\\.|[^\]\\])+\]|[^\\()\[\]{}*+?|^$])"
_NESTED = re.compile(rf"\((?:\?:)?{_ATOM}(?:[*+]|\{{[0-9]+,\}})\)(?:[*+]|\{{[0-9]+,\}})")


def _refuse_nested_repetition(pattern: str, name: str) -> None:
    """`(a+)+` says what `a+` says, but whoever checks the answer by backtracking pays exponentially for it."""
    if found := _NESTED.search(pattern):
        raise ValueError(f"{name} must not repeat a repetition, as {found[0][:100]!r} does: one of the two is enough")
