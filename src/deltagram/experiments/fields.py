"""Reads a TOML table strictly: every problem is collected, with the path of its key, and none stops the reading."""

import re
from collections.abc import Callable, Sequence
from typing import Any

REQUIRED: Any = object()


class Table:
    """One table of a plan. A key that is missing or wrong adds a line to `problems` and yields a placeholder."""

    def __init__(self, values: Any, path: str, problems: list[str]) -> None:
        self.path, self.problems = path, problems
        self.values: dict[str, Any] = values if isinstance(values, dict) else {}
        self.known: set[str] = set()
        if not isinstance(values, dict):
            self.problem("", f"is {values!r:.80}; expected a table")

    def problem(self, key: str, text: str) -> None:
        self.problems.append(f"{'.'.join(part for part in (self.path, key) if part)} {text}")

    def get(self, key: str, default: Any, valid: Callable[[Any], bool], expected: str, placeholder: Any) -> Any:
        self.known.add(key)
        if key not in self.values:
            if default is REQUIRED:
                self.problem(key, f"is missing; expected {expected}")
            return placeholder if default is REQUIRED else default
        value = self.values[key]
        if valid(value):
            return value
        self.problem(key, f"is {value!r:.80}; expected {expected}")
        return placeholder if default is REQUIRED else default

    def text(self, key: str, default: Any = REQUIRED) -> Any:
        return self.get(key, default, lambda v: isinstance(v, str) and v.strip() != "", "a text", "?")

    def choice(self, key: str, choices: Sequence[str], default: Any = REQUIRED) -> Any:
        return self.get(key, default, lambda v: v in choices, "one of " + ", ".join(choices), choices[0])

    def flag(self, key: str, default: bool) -> bool:
        return bool(self.get(key, default, lambda v: isinstance(v, bool), "true or false", default))

    def integer(self, key: str, default: Any = REQUIRED, least: int = 0) -> Any:
        return self.get(key, default, lambda v: type(v) is int and v >= least, f"an integer from {least} up", least)

    def number(self, key: str, default: Any = REQUIRED, above: float = 0.0, below: float = 1e12) -> Any:
        """A number in (above, below)."""
        expected = f"a number above {above:g}" + (f" and below {below:g}" if below < 1e12 else "")
        value = self.get(key, default, lambda v: type(v) in (int, float) and above < v < below, expected, 0.0)
        return float(value) if type(value) is int else value

    def from_zero(self, key: str, default: Any = REQUIRED) -> Any:
        """A number from 0 up."""
        value = self.get(key, default, lambda v: type(v) in (int, float) and 0 <= v < 1e12, "a number from 0 up", 0.0)
        return float(value) if type(value) is int else value

    def integers(self, key: str, default: Any = REQUIRED) -> Any:
        def valid(value: Any) -> bool:
            return isinstance(value, list) and all(type(entry) is int for entry in value)

        return self.get(key, default, valid, "a list of integers", [])

    def texts(self, key: str, default: Any = REQUIRED) -> Any:
        """A list of texts, or one text, which is left as it is."""

        def valid(value: Any) -> bool:
            return (isinstance(value, str) and value.strip() != "") or (
                isinstance(value, list) and value != [] and all(isinstance(entry, str) for entry in value)
            )

        return self.get(key, default, valid, "a command: a text or a list of texts", "?")

    def mapping(self, key: str) -> dict[str, Any]:
        """A table of plain values; {} when absent."""

        def valid(value: Any) -> bool:
            return isinstance(value, dict)

        return dict(self.get(key, {}, valid, "a table", {}))

    def table(self, key: str, required: bool = False) -> "Table | None":
        self.known.add(key)
        if key not in self.values:
            if required:
                self.problem(key, "is missing; expected a table")
            return None
        return Table(self.values[key], f"{self.path}.{key}" if self.path else key, self.problems)

    def pattern(self, key: str, default: Any = REQUIRED) -> Any:
        """A regular expression that compiles."""
        value = self.text(key, default)
        if isinstance(value, str):
            try:
                re.compile(value)
            except re.error as error:
                self.problem(key, f"is {value!r:.80}, which is no regular expression: {error}")
        return value

    def done(self) -> None:
        """Reports the keys that nobody asked for: a misspelt rule must not be a rule that silently does nothing."""
        for key in self.values:
            if key not in self.known:
                self.problem(key, f"is not a key; expected one of {', '.join(sorted(self.known))}")
