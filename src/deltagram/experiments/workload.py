"""The prompt manifest: what is sent, turn by turn, as JSON lines whose hash goes into the result.

One line is one session:

    {"session": "s0", "start_s": 0.0, "turns": [{"text": "...", "output_tokens": 64, "delay_s": 0.5}, ...]}

`start_s` (when the session arrives) may be absent; `delay_s` is the gap before a turn, such as the time a tool takes,
and is 0 when absent. A line `{"text": ..., "output_tokens": ...}` is a session of one turn. Two forms of the field are
read as well: `prompt` for `text`, and Mooncake's traces (`timestamp` in ms, `input_length`, `output_length`,
`hash_ids`: ids of 512-token pieces, equal ids for equal text).

Text is made by SHAKE-256, never from `hash()`, which gives every process other prompts. A word of it is about one token
in most tokenizers; the server's own count is what the results report.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOONCAKE_PIECE = 512  # tokens per hash id
_WORDS = (
    "time year people way day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work number night point home water "
    "room mother area money story fact month lot right study book eye job word business issue side kind head "
    "house service friend father power hour game line end member law car"
).split()
_BYTE_WORDS = [_WORDS[byte % len(_WORDS)] for byte in range(256)]


@dataclass(frozen=True)
class Turn:
    text: str
    output_tokens: int
    delay_s: float = 0.0


@dataclass(frozen=True)
class Session:
    name: str
    turns: tuple[Turn, ...]
    start_s: float | None = None


@dataclass(frozen=True)
class Manifest:
    sessions: tuple[Session, ...]

    def lines(self) -> str:
        """The manifest as JSON lines; the form that is hashed and stored."""
        rows = []
        for session in self.sessions:
            turns = [{"text": t.text, "output_tokens": t.output_tokens, "delay_s": t.delay_s} for t in session.turns]
            row: dict[str, Any] = {"session": session.name, "turns": turns}
            if session.start_s is not None:
                row["start_s"] = session.start_s
            rows.append(json.dumps(row, ensure_ascii=False) + "\n")
        return "".join(rows)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.lines().encode()).hexdigest()


def words(count: int, key: str) -> str:
    """`count` words that are a function of `key` alone."""
    return " ".join(map(_BYTE_WORDS.__getitem__, hashlib.shake_256(key.encode()).digest(count)))


def synthetic(
    *,
    sessions: int,
    turns: int = 1,
    input_tokens: int,
    output_tokens: int,
    delay_s: float = 0.0,
    shared_tokens: int = 0,
    seed: int = 0,
) -> Manifest:
    """Sessions of `turns` turns, each of about `input_tokens` fresh words; the first turn starts with `shared_tokens`
    words that all sessions share (a system prompt). No two sessions share anything else, so that what a prefix cache
    can hit is what was asked for."""
    shared = words(shared_tokens, f"{seed}/shared") + " " if shared_tokens else ""
    made = []
    for index in range(sessions):
        texts = [words(input_tokens, f"{seed}/{index}/{turn}") for turn in range(turns)]
        texts[0] = shared + texts[0]
        made.append(
            Session(
                f"s{index}",
                tuple(Turn(text, output_tokens, delay_s if turn else 0.0) for turn, text in enumerate(texts)),
            )
        )
    return Manifest(tuple(made))


def read(path: Path) -> Manifest:
    """The manifest in a JSON lines file. Raises ValueError naming every bad line."""
    sessions, problems = list[Session](), list[str]()
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            sessions.append(_session(json.loads(line), f"s{len(sessions)}"))
        except (ValueError, KeyError, TypeError) as error:
            wrong = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
            problems.append(f"{path.name}:{number}: {wrong}")
    if not sessions and not problems:
        problems.append(f"{path.name} holds no sessions")
    names = [session.name for session in sessions]
    for name in sorted({name for name in names if names.count(name) > 1}):
        problems.append(f"{path.name}: session {name!r} occurs {names.count(name)} times; names must differ")
    if problems:
        raise ValueError("cannot read the prompt manifest:\n  " + "\n  ".join(problems))
    return Manifest(tuple(sessions))


def _session(row: Any, name: str) -> Session:
    if not isinstance(row, dict):
        raise ValueError(f"is {row!r:.60}; expected a JSON object")
    start = row.get("start_s")
    if "input_length" in row:
        return Session(name, (Turn(_mooncake_text(row), int(row["output_length"])),), float(row["timestamp"]) / 1e3)
    turns = tuple(_turn(turn) for turn in row["turns"]) if "turns" in row else (_turn(row),)
    if not turns:
        raise ValueError("a session without turns")
    return Session(str(row.get("session", name)), turns, None if start is None else float(start))


def _turn(row: dict[str, Any]) -> Turn:
    text = row["text"] if "text" in row else row["prompt"]
    turn = Turn(text, row["output_tokens"], float(row.get("delay_s", 0.0)))
    if not isinstance(text, str) or not text:
        raise ValueError(f"text is {text!r:.60}; expected a text")
    if type(turn.output_tokens) is not int or turn.output_tokens < 1 or turn.delay_s < 0.0:
        raise ValueError(
            f"output_tokens {turn.output_tokens!r} and delay_s {turn.delay_s!r}; expected an integer from 1 up "
            "and a number from 0 up"
        )
    return turn


def _mooncake_text(row: dict[str, Any]) -> str:
    length = int(row["input_length"])
    if length < 1:
        raise ValueError(f"input_length is {length}; expected an integer from 1 up")
    pieces = [words(MOONCAKE_PIECE, f"mooncake/{piece}") for piece in row.get("hash_ids") or []]
    pieces.append(words(length, f"mooncake/{row['timestamp']}/{length}/{row['output_length']}"))
    return " ".join(" ".join(pieces).split()[:length])
