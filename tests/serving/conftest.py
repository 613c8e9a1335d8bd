"""Servers to test: the real command in a process of its own, with a tiny checkpoint or the shipped model."""

import sys
from pathlib import Path

import pytest

from deltagram.testing.checkpoints import write_tiny_checkpoint
from deltagram.testing.server import COMMAND, RunningServer


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A tiny checkpoint whose tokens are bytes."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen4_exp")


@pytest.fixture(scope="session")
def server(tiny, tmp_path_factory):
    """One server for the tests that leave it as it was."""
    running = RunningServer(tmp_path_factory.mktemp("server"), str(tiny), "--name", "tiny", "--device", "cpu")
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
        started.append(RunningServer(folder, str(tiny), "--name", "tiny", "--device", "cpu", *arguments, **options))
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
def start_limited(start):
    """Like `start_paced`, from a shell that allows so many open files."""
    shell = "sh", "-c", 'ulimit -Sn "$0"; exec "$@"'
    paced = with_worker("paced_worker.py")
    return lambda files, *arguments: start(*arguments, command=(*shell, str(files), *paced))


@pytest.fixture(scope="session")
def run_shipped(tmp_path_factory):
    """Starts servers of the shipped model."""
    started = []

    def run(*arguments):
        started.append(RunningServer(tmp_path_factory.mktemp("shipped"), "--device", "cpu", *arguments))
        return started[-1]

    yield run
    for running in started:
        running.close()


@pytest.fixture
def command_line():
    """The words of the command, without arguments."""
    return COMMAND
