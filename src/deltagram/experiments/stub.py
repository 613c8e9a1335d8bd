"""A stub of an OpenAI-compatible server whose timing is known: the yardstick of the load generator's self-test.

    python -m deltagram.experiments.stub --ttft-ms 50 --tpot-ms 10

prints its URL and answers until it is ended. Every piece of text leaves at `start + ttft + i * tpot`, so lateness does
not add up. The words are a function of the prompt; one word counts as one token.
"""

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deltagram.experiments.workload import words


async def serve(port: int, ttft_ms: float, tpot_ms: float) -> None:
    """Serves on 127.0.0.1:`port` (0: any free one) until cancelled."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await _answer(reader, writer, ttft_ms / 1e3, tpot_ms / 1e3):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client went away, which ends this connection and nothing else
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", port)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    async with server:
        await server.serve_forever()


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ttft_s: float, tpot_s: float) -> bool:
    """One request of a kept-alive connection; False at its end."""
    request = await reader.readline()
    if not request:
        return False
    path, length = request.split()[1].decode(), 0
    while (header := await reader.readline()) not in (b"\r\n", b""):
        name, _, value = header.decode("latin-1").partition(":")
        if name.lower() == "content-length":
            length = int(value)
    start = asyncio.get_running_loop().time()
    body = json.loads(await reader.readexactly(length)) if length else {}
    if path in ("/v1/chat/completions", "/v1/completions"):
        await _stream(writer, body, start + ttft_s, tpot_s)
    else:
        known: dict[str, Any] = {"/health": {"status": "ok"}, "/v1/models": {"data": [{"id": "stub"}]}}
        content = json.dumps(known.get(path, {"error": f"no {path}"})).encode()
        status = b"200 OK" if path in known else b"404 Not Found"
        writer.write(b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: " % status)
        writer.write(b"%d\r\n\r\n%s" % (len(content), content))
    await writer.drain()
    return True


async def _stream(writer: asyncio.StreamWriter, body: dict[str, Any], first: float, tpot_s: float) -> None:
    chat = "messages" in body
    prompt = " ".join(message["content"] for message in body["messages"]) if chat else body["prompt"]
    count = body["max_tokens"]
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
    for index, word in enumerate(words(count, prompt).split()):
        await asyncio.sleep(first + index * tpot_s - asyncio.get_running_loop().time())
        choice: dict[str, Any] = {"delta": {"content": word + " "}} if chat else {"text": word + " "}
        _event(writer, {"choices": [choice | {"index": 0}]})
    usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": count}
    _event(writer, {"choices": [], "usage": usage | {"total_tokens": sum(usage.values())}})
    _event(writer, None)
    writer.write(b"0\r\n\r\n")


def _event(writer: asyncio.StreamWriter, event: dict[str, Any] | None) -> None:
    data = b"data: %s\n\n" % (b"[DONE]" if event is None else json.dumps(event).encode())
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


@contextmanager
def stub_server(*, ttft_ms: float, tpot_ms: float) -> Iterator[str]:
    """The stub in a process of its own: yields its URL."""
    command = [sys.executable, "-m", "deltagram.experiments.stub", f"--ttft-ms={ttft_ms}", f"--tpot-ms={tpot_ms}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            if not url:
                raise RuntimeError(f"the stub server did not start (exit status {process.wait()})")
            yield url
        finally:
            process.terminate()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--ttft-ms", type=float, default=50.0)
    parser.add_argument("--tpot-ms", type=float, default=10.0)
    options = parser.parse_args()
    try:
        asyncio.run(serve(options.port, options.ttft_ms, options.tpot_ms))
    except KeyboardInterrupt:
        pass
