"""A server in a process of its own, for tests and benchmarks: the real command, started and stopped."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

COMMAND = (sys.executable, "-c", "from deltagram.cli import main; main()", "serve")


class RunningServer:
    """A running server. `client` asks it; its messages go to the file `log` in `folder`.

    It has one thread unless `environment` says otherwise: on a busy machine those of a step wait for each other.
    """

    def __init__(self, folder: Path, *arguments: str, command: Sequence[str] = COMMAND, **environment: str) -> None:
        self.log = folder / "log"
        self.file = self.log.open("wb")
        env = os.environ | {"OMP_NUM_THREADS": "1"} | environment
        self.process = subprocess.Popen([*command, "--port", "0", *arguments], stderr=self.file, env=env)
        self.url = self._address()
        self.client = httpx.Client(base_url=self.url, timeout=60)

    def _address(self) -> str:
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline and self.process.poll() is None:
            if found := re.search(r"is served at (\S+)", self.messages()):
                return found[1]
            time.sleep(0.05)
        self.process.kill()
        raise RuntimeError(f"no server: {self.messages()}")

    def messages(self) -> str:
        """What it said so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def engine_pid(self) -> int:
        """The process that runs the model."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        assert len(children) == 1
        return int(children[0])

    def gauges(self) -> dict[str, float]:
        """All metrics without labels."""
        lines = self.client.get("/metrics").text.splitlines()
        return {name: float(value) for name, value in (line.split() for line in lines if re.match(r"\w+ ", line))}

    def wait_until(self, test: Callable[[], object], seconds: float) -> float:
        """Seconds until `test()` is true."""
        began = time.monotonic()
        while not test():
            assert time.monotonic() - began < seconds, f"not within {seconds} s"
            time.sleep(0.01)
        return time.monotonic() - began

    def close(self) -> None:
        """Stop it, and wait until it has."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.client.close()
        self.file.close()

    def __enter__(self) -> "RunningServer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def events(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a stream."""
    with client.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def ask(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """A whole answer."""
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def streamed_texts(chunks: Sequence[dict[str, Any]], count: int) -> list[str]:
    """What the chunks of a stream say, for each of its `count` choices."""
    texts = [""] * count
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "") if "delta" in choice else choice["text"]
    return texts
