"""What a client may ask of the server: every bound with its default, each a setting (`--limit name=value`)."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Sequences are counted as the engine runs them: prompts times n.

    max_queued: sequences admitted beyond those that run at once; more are refused with 503.
    max_queued_tokens: prompt tokens of sequences that have no token yet; more are refused with 503 while any wait.
    max_connections: HTTP requests open at once, of whatever kind.
    max_body_bytes, max_body_seconds: size of a request's body, and the time to send it.
    max_prompts, max_n: prompts of one request, and sequences of one prompt.
    max_stop: stop strings of one request.
    max_schema_bytes, max_schema_depth: of a JSON schema, as compact JSON. A regex has the same bytes.
    max_compile_seconds: to compile a schema or regex.
    max_request_seconds: from a request's arrival to its last token.
    max_unread: pieces of text that wait for a slow reader before its request is given up.
    max_send_seconds: how long a reader may take nothing at all.
    retry_after_seconds: what a refused client is told to wait.
    stall_seconds: without a step while there is work, after which the server calls itself unhealthy.
    grace_seconds: for running requests after SIGTERM.
    """

    max_queued: int = 128
    max_queued_tokens: int = 262_144
    max_connections: int = 1024
    max_body_bytes: int = 1 << 20
    max_body_seconds: float = 30.0
    max_prompts: int = 64
    max_n: int = 16
    max_stop: int = 16
    max_schema_bytes: int = 65_536
    max_schema_depth: int = 32
    max_compile_seconds: float = 0.5
    max_request_seconds: float = 600.0
    max_unread: int = 1024
    max_send_seconds: float = 30.0
    retry_after_seconds: int = 1
    stall_seconds: float = 10.0
    grace_seconds: float = 30.0


def parse(values: Mapping[str, Any]) -> Limits:
    """Limits from keywords. Raises ValueError naming every unknown one and every value that is no positive number;
    the queue alone may be 0."""
    kinds = {field.name: field.type for field in fields(Limits)}
    problems = [f"there is no limit {name}; there are {', '.join(kinds)}" for name in values if name not in kinds]
    for name, value in values.items():
        if name not in kinds:
            continue
        least = "at least 0" if name == "max_queued" else "above 0"
        fits = value >= 0 if name == "max_queued" and _is_number(value) else _is_number(value) and 0 < value < 1e12
        if not fits or (kinds[name] is int and not isinstance(value, int)):
            kind = "an integer" if kinds[name] is int else "a number"
            problems.append(f"{name} must be {kind} {least}, got {value!r}")
    if problems:
        raise ValueError("limits that cannot be honoured:\n" + "\n".join(f"- {problem}" for problem in problems))
    return Limits(**values)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
