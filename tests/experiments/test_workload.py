"""Manifests: the same prompts in every process, and the trace files of the field."""

import json
import subprocess
import sys

import pytest

from deltagram.experiments.workload import Manifest, Session, Turn, read, synthetic, words


def test_prompts_are_the_same_in_every_process():
    code = (
        "from deltagram.experiments.workload import synthetic;"
        "print(synthetic(sessions=3, turns=2, input_tokens=20, output_tokens=4, shared_tokens=5, seed=9).sha256)"
    )
    made = [
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        ).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    assert made[0] == made[1]
    assert (
        made[0].strip()
        == synthetic(sessions=3, turns=2, input_tokens=20, output_tokens=4, shared_tokens=5, seed=9).sha256
    )


def test_sessions_share_the_prefix_that_was_asked_for_and_nothing_else():
    manifest = synthetic(sessions=20, turns=2, input_tokens=30, output_tokens=4, shared_tokens=10, delay_s=0.5)
    firsts = [session.turns[0].text.split() for session in manifest.sessions]
    assert all(len(first) == 40 and first[:10] == firsts[0][:10] for first in firsts)
    assert len({tuple(first[10:14]) for first in firsts}) == 20
    assert [turn.delay_s for turn in manifest.sessions[0].turns] == [0.0, 0.5]
    other = synthetic(sessions=20, turns=2, input_tokens=30, output_tokens=4, shared_tokens=10, delay_s=0.5, seed=1)
    assert other.sha256 != manifest.sha256


def test_a_manifest_survives_its_file(tmp_path):
    manifest = Manifest((Session("a", (Turn("häh", 3), Turn("again", 5, 0.25)), 1.5), Session("b", (Turn("x", 1),))))
    (tmp_path / "m.jsonl").write_text(manifest.lines())
    assert read(tmp_path / "m.jsonl") == manifest


def test_short_and_mooncake_lines(tmp_path):
    rows = [
        {"prompt": "hello", "output_tokens": 7},
        {"timestamp": 1500, "input_length": 700, "output_length": 9, "hash_ids": [3, 4]},
        {"timestamp": 2500, "input_length": 600, "output_length": 9, "hash_ids": [3, 8]},
        {"timestamp": 2600, "input_length": 40, "output_length": 2},
    ]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    hello, first, second, bare = read(tmp_path / "t.jsonl").sessions
    assert hello.turns == (Turn("hello", 7),) and hello.start_s is None
    assert (first.start_s, second.start_s) == (1.5, 2.5)
    one, two = first.turns[0].text.split(), second.turns[0].text.split()
    assert len(one) == 700 and len(two) == 600 and one[:512] == two[:512] and one[512:600] != two[512:]
    assert len(bare.turns[0].text.split()) == 40 and bare.turns[0].output_tokens == 2


def test_every_bad_line_is_named(tmp_path):
    lines = [
        "not json",
        '{"text": "x"}',
        '{"text": "", "output_tokens": 1}',
        '{"text": "x", "output_tokens": 0}',
        '{"session": "a", "turns": []}',
        "[1]",
        '{"timestamp": 0, "input_length": 0, "output_length": 1}',
        '{"session": "z", "turns": [{"text": "x", "output_tokens": 1}]}',
        '{"session": "z", "turns": [{"text": "y", "output_tokens": 1}]}',
    ]
    (tmp_path / "bad.jsonl").write_text("\n".join(lines))
    with pytest.raises(ValueError) as error:
        read(tmp_path / "bad.jsonl")
    for number in range(1, 8):
        assert f"bad.jsonl:{number}: " in str(error.value)
    assert "session 'z' occurs 2 times" in str(error.value)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="holds no sessions"):
        read(tmp_path / "empty.jsonl")


def test_words_are_a_function_of_the_key():
    assert words(8, "k") == words(20, "k")[: len(words(8, "k"))]
    assert words(40, "k") != words(40, "l")
