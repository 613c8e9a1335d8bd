"""Reads the fields of a JSON object strictly, and collects every problem instead of stopping at the first."""

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

REQUIRED: Any = object()
FINITE = sys.float_info.max


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in the file `path`. Raises ValueError where the file is missing or holds anything else."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist; expected a checkpoint folder as Hugging Face tools write it")
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:  # of the JSON, of its UTF-8, or of absurd nesting
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a JSON {type(values).__name__}; expected an object")
    return values


class FieldReader:
    """Reads the fields of `values`. A bad one adds a line to `problems` and yields a placeholder, so that reading goes
    on; `check` then skips the relations it takes part in, which could only mislead. A null stands for an absent field
    where the default itself is None, and is a wrong value elsewhere."""

    def __init__(self, values: dict[str, Any], problems: list[str], prefix: str = "") -> None:
        self.values, self.problems, self.prefix = values, problems, prefix
        self.used: set[str] = set()
        self.bad: set[str] = set()

    def check(self, holds: bool, problem: str, *names: str) -> None:
        """Notes `problem` unless it `holds` or a field it speaks of is bad already."""
        if not holds and not self.bad.intersection(names):
            self.problems.append(self.prefix + problem)

    def integer(self, name: str, default: Any = REQUIRED, minimum: int = 1, maximum: int = 2**31 - 1) -> Any:
        def valid(value: Any) -> bool:
            return type(value) is int and minimum <= value <= maximum

        return self._get(name, default, valid, f"an integer in [{minimum}, {maximum}]", minimum)

    def number(
        self, name: str, default: Any = REQUIRED, above: float = 0.0, at_most: float = FINITE, or_zero: bool = False
    ) -> Any:
        def valid(value: Any) -> bool:
            return type(value) in (int, float) and (above < value <= at_most or (or_zero and value == 0))

        expected = ("zero or " if or_zero else "") + f"a number above {above:g}"
        expected += "" if at_most == FINITE else f" and at most {at_most:g}"
        value = self._get(name, default, valid, expected, 1.0)
        return value if value is None else float(value)

    def flag(self, name: str, default: bool) -> bool:
        value: bool = self._get(name, default, lambda value: type(value) is bool, "true or false", default)
        return value

    def choice(self, name: str, default: str | None, choices: Iterable[str]) -> Any:
        return self._get(name, default, lambda value: value in choices, f"one of {', '.join(choices)}", default)

    def list_of(self, kind: type, name: str) -> Any:
        def valid(value: Any) -> bool:
            return isinstance(value, list) and all(type(entry) is kind for entry in value)

        return self._get(name, None, valid, f"a list of {kind.__name__}", None)

    def _get(self, name: str, default: Any, valid: Callable[[Any], bool], expected: str, placeholder: Any) -> Any:
        self.used.add(name)
        value = self.values.get(name, default)
        if value is not REQUIRED and (valid(value) or (value is None and default is None)):
            return value
        got = f"is {self.values[name]!r:.100}" if name in self.values else "is missing"
        self.problems.append(f"{self.prefix}{name} {got}; expected {expected}")
        self.bad.add(name)
        return placeholder
