"""Servers to test: the real command in a process of its own, with a tiny checkpoint or the shipped model."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from deltagram.testing.checkpoints import write_tiny_checkpoint

COMMAND = (sys.executable, "-c", "from deltagram.cli import main; main()", "serve")


class Running:
    """A running server. `client` asks it; `log` is the file that its messages go to."""

    def __init__(self, folder: Path, *arguments: str, command: tuple[str, ...] = COMMAND, **environment: str) -> None:
        self.log = folder / "log"
        self.file = self.log.open("wb")
        # One thread: on a busy machine those of a step wait for each other.
        env = os.environ | {"OMP_NUM_THREADS": "1"} | environment
        self.process = subprocess.Popen([*command, "--port", "0", *arguments], stderr=self.file, env=env)
        self.url = self._address()
        self.client = httpx.Client(base_url=self.url, timeout=60)

    def _address(self) -> str:
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline and self.process.poll() is None:
            if found := re.search(r"is served at (\S+)", self.messages()):
                return found[1]
            time.sleep(0.05)
        self.process.kill()
        raise AssertionError(f"no server: {self.messages()}")

    def messages(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        assert len(children) == 1
        return int(children[0])

    def gauges(self) -> dict[str, float]:
        """All metrics without labels."""
        lines = self.client.get("/metrics").text.splitlines()
        return {name: float(value) for name, value in (line.split() for line in lines if re.match(r"\w+ ", line))}

    def wait_until(self, test, seconds: float) -> float:
        """Seconds until `test()` is true."""
        began = time.monotonic()
        while not test():
            assert time.monotonic() - began < seconds, f"not within {seconds} s"
            time.sleep(0.01)
        return time.monotonic() - began

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.client.close()
        self.file.close()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A tiny checkpoint whose tokens are bytes."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen4_exp")


@pytest.fixture(scope="session")
def server(tiny, tmp_path_factory):
    """One server for the tests that leave it as it was."""
    running = Running(tmp_path_factory.mktemp("server"), str(tiny), "--name", "tiny", "--device", "cpu")
    yield running
    running.close()
    assert running.process.returncode == 0, running.messages()


@pytest.fixture
def start(tiny, tmp_path):
    """Starts servers that belong to one test: `start("--limit", "max_queued=1")`."""
    started = []

    def start(*arguments, **options):
        folder = tmp_path / str(len(started))
        folder.mkdir()
        started.append(Running(folder, str(tiny), "--name", "tiny", "--device", "cpu", *arguments, **options))
        return started[-1]

    yield start
    for running in started:
        running.close()


def with_worker(name: str) -> tuple[str, ...]:
    """The command, with the engine process of a file beside this one."""
    code = f"""
import functools, sys
from deltagram.serving import command
from deltagram.cli import main
command.serve = functools.partial(command.serve, command=(sys.executable, {str(Path(__file__).with_name(name))!r}))
main()
"""
    return (sys.executable, "-c", code, "serve")


@pytest.fixture
def start_faulty(start):
    """Like `start`, with the engine process of faulty_worker.py."""
    return lambda *arguments: start(*arguments, command=with_worker("faulty_worker.py"))


@pytest.fixture
def start_paced(start):
    """Like `start`, with the engine process of paced_worker.py."""
    return lambda *arguments, **rest: start(*arguments, command=with_worker("paced_worker.py"), **rest)


@pytest.fixture
def command_line():
    """The words of the command, without arguments."""
    return COMMAND
