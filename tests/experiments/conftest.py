"""Plans whose arms are tiny scripts: each test says what an arm does in a line of Python."""

import textwrap
from pathlib import Path

import pytest

ARM = """
import json, os, random, sys, time
trace = sys.argv[1] if len(sys.argv) > 1 else None

def write(ms, steps=60, digest="same", **about):
    with open(trace, "w") as file:
        for step in range(steps):
            row = {"step": step, "ms": ms * (1 + 0.01 * (step % 3)), "kind": "decode", "tokens": 1}
            file.write(json.dumps({**row, "sequences": 1, "bucket": "1"}) + "\\n")
        file.write(json.dumps({"digest": digest, **about}) + "\\n")

def count(name):
    'How often this was called before, over all launches of the test.'
    with open(name, "a+") as file:
        file.write("x")
        return file.tell() - 1
"""


@pytest.fixture
def make_plan(tmp_path: Path):
    """Writes tmp_path/plan.toml with arms A and B given as Python, and returns its path."""

    def make(
        a: str, b: str, design: str = "", extra: str = "", name: str = "test", measure: str = "kind = 'step'"
    ) -> Path:
        for letter, body in (("A", a), ("B", b)):
            (tmp_path / f"arm_{letter}.py").write_text(ARM + textwrap.dedent(body) + "\n")
        design = "\n".join(line.strip() for line in (design or "blocks = 3\nmargin = 0.05").splitlines())
        arms = "".join(
            f"[arm.{letter}]\ncommand = ['{{python}}', '-S', '-E', 'arm_{letter}.py', '{{trace}}']\n" for letter in "AB"
        )
        plan = tmp_path / "plan.toml"
        plan.write_text(f"name = '{name}'\n[design]\n{design}\n{arms}[measure]\n{measure}\n{textwrap.dedent(extra)}\n")
        return plan

    return make
