"""Clients that others wrote, on the shipped model. Each runs with every interpreter of DELTAGRAM_CLIENTS that has it
(paths, separated by colons), so that two versions of one client can be tried; without the variable, with our own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.conformance
HERE = Path(__file__).parent
MODEL, KEY = "deltagram-demo", "sk-test"
PYTHONS = os.environ.get("DELTAGRAM_CLIENTS", sys.executable).split(":")


def having(package: str) -> list[str]:
    """The interpreters that have a package."""
    found = [python for python in PYTHONS if subprocess.run([python, "-c", f"import {package}"]).returncode == 0]
    if not found:
        pytest.skip(f"{package} is not installed: pip install 'deltagram[conformance]'")
    return found


@pytest.fixture(scope="module")
def shipped(run_shipped):
    server = run_shipped("--api-key", KEY)
    yield server
    health = server.client.get("/health", headers={"Authorization": f"Bearer {KEY}"})
    assert health.status_code == 200, health.text
    assert "Traceback" not in server.messages() and "failed" not in server.messages()


def run(*words: str) -> str:
    result = subprocess.run(words, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-3000:]
    return result.stdout


@pytest.mark.parametrize("client", ["openai", "litellm"])
def test_client(shipped, client):
    for python in having(client):
        assert "ok" in run(python, str(HERE / f"{client}_client.py"), shipped.url, MODEL)


def test_schemathesis_finds_no_server_error(shipped):
    python = having("schemathesis")[0]
    program = str(Path(python).with_name("schemathesis"))
    examples = os.environ.get("DELTAGRAM_EXAMPLES", "20")
    run(
        program, "run", f"{shipped.url}/openapi.json", "--header", f"Authorization: Bearer {KEY}",
        "--checks", "not_a_server_error", "--max-examples", examples, "--seed", "1",
        "--phases", "examples,coverage,fuzzing", "--request-timeout", "60", "--no-color",
    )  # fmt: skip
