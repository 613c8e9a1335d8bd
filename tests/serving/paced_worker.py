"""An engine process without a model: every few milliseconds each running sequence says its next letter.

It starts at once and keeps time, for tests of what the server does around an engine. Options: those of the command's
`--set`, of which it reads max_num_sequences.
"""

import queue
import socket
import sys
import threading
import time

from deltagram.serving import channel

STEP_SECONDS = 0.004
COUNTS = ("prefill_tokens", "decode_tokens", "padding_tokens", "memory_rows", "preemptions")
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def serve(descriptor: int) -> None:
    connection = socket.socket(fileno=descriptor)
    file = connection.makefile("rb")
    options = channel.read(file)
    assert options is not None
    capacity = options.get("max_num_sequences", 16)
    facts = {"folder": options["model"], "vocab_size": 264, "max_length": 100_000, "max_num_sequences": capacity}
    facts |= {"end_token_ids": [256], "num_pages": 100, "tables": [], "device": "none", "notes": []}
    connection.sendall(channel.pack(facts))
    inbox: queue.SimpleQueue = queue.SimpleQueue()

    def read() -> None:
        while (message := channel.read(file)) is not None:
            inbox.put(message)
        inbox.put(None)

    threading.Thread(target=read, daemon=True).start()
    sequences: dict[int, list] = {}  # id: said, most, logprobs
    steps = 0
    while True:
        while not inbox.empty():
            message = inbox.get()
            if message is None:
                return
            for sequence in message.get("abort", ()):
                sequences.pop(sequence, None)
            if "add" in message:
                params, first = message["params"], message["add"]
                count = sum(len(prompt["seeds"]) for prompt in message["prompts"])
                for sequence in range(first, first + count):
                    sequences[sequence] = [0, params["max_tokens"], params["logprobs"]]
                connection.sendall(channel.pack({"request": first, "accepted": True}))
        time.sleep(STEP_SECONDS)
        deltas = []
        for sequence in list(sequences)[:capacity]:
            said, most, logprobs = sequences[sequence]
            sequences[sequence][0] += 1
            reason = "length" if said + 1 == most else None
            letter = LETTERS[said % 26]
            told = None if logprobs is None else [[ord(letter), -1.0, [[token, -2.0] for token in range(logprobs)]]]
            deltas.append([sequence, letter, [ord(letter)], told, reason, None])
            if reason:
                del sequences[sequence]
        steps += bool(deltas)
        counts = dict.fromkeys(COUNTS, 0)
        gauges = {"running": len(deltas), "waiting": max(len(sequences) - capacity, 0)}
        gauges |= {"pages_used": len(deltas), "slots_used": len(deltas), "prefix_checkpoints": 0, "prefix_pages": 0}
        message = {"deltas": deltas, "step": None, "counts": counts | {"num_steps": steps}, "gauges": gauges}
        connection.sendall(channel.pack(message | {"prefix_misses": {}, "cached_rows": None}))


if __name__ == "__main__":
    serve(int(sys.argv[1]))
