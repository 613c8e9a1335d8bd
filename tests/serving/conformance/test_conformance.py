"""Clients that others wrote, on the shipped model. Each runs with every interpreter of DELTAGRAM_CLIENTS that has it
(paths, separated by colons), so that two versions of one client can be tried; without the variable, with our own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deltagram.llm import shipped_model

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
    result = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-3000:]
    return result.stdout


@pytest.mark.parametrize("client", ["openai", "litellm"])
def test_client(shipped, client):
    for python in having(client):
        assert "ok" in run(python, str(HERE / f"{client}_client.py"), shipped.url, MODEL)


@pytest.mark.timeout(660)
def test_schemathesis_finds_no_server_error(shipped):
    python = having("schemathesis")[0]
    program = str(Path(python).with_name("schemathesis"))
    examples = os.environ.get("DELTAGRAM_EXAMPLES", "50")
    run(
        program, "run", f"{shipped.url}/openapi.json", "--header", f"Authorization: Bearer {KEY}",
        "--checks", "not_a_server_error", "--max-examples", examples, "--seed", "1",
        "--phases", "examples,coverage,fuzzing", "--request-timeout", "60", "--no-color",
    )  # fmt: skip


def test_guidellm_loads_the_server(shipped, tmp_path):
    python, report = having("guidellm")[0], tmp_path / "report.json"
    run(
        python, "-m", "guidellm", "run", "--disable-console",
        "--backend", f"kind=openai_http,target={shipped.url},model={MODEL},api_key={KEY}",
        "--profile", "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=12",
        "--tokenizer", f"kind=hf_auto,model={shipped_model()}",
        "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16", "--output", f"kind=json,path={report}",
    )  # fmt: skip
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals["successful"] == 12 and totals["errored"] == totals["incomplete"] == 0
    assert benchmark["metrics"]["output_token_count"]["successful"]["mean"] == 16
