"""One launch of a deltagram model under the `step` measure: runs the prompts, writes the step trace.

    python run_model.py SPEC.json

SPEC.json: {"model", "settings", "prompts", "trace"}. All sessions of the manifest run together, turn by turn, greedily
and at their forced output lengths. Trace: one JSON line per step, as the engine counts them, then one line with the
digest of all output tokens and the length of each output. Imports nothing of this package but the engine it measures,
so that it can be run on another commit's.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any


def run(spec: dict[str, Any]) -> None:
    from deltagram import LLM, SamplingParams

    sessions = [json.loads(line)["turns"] for line in Path(spec["prompts"]).read_text().splitlines()]
    llm = LLM(None if spec["model"] == "demo" else spec["model"], **spec["settings"])
    said: list[list[int]] = [[] for _ in sessions]
    digest, lengths = hashlib.sha256(), list[int]()
    for turn in range(max(len(turns) for turns in sessions)):
        # One call per output length, since the parameters of a call are shared.
        due: dict[int, list[int]] = {}
        for index, turns in enumerate(sessions):
            if turn < len(turns):
                due.setdefault(turns[turn]["output_tokens"], []).append(index)
        for length, indices in due.items():
            for index in indices:
                said[index] += llm.tokenizer.encode(sessions[index][turn]["text"])
            params = SamplingParams(temperature=0.0, max_tokens=length, min_tokens=length, ignore_eos=True)
            for index, done in zip(indices, llm.generate([said[index] for index in indices], params), strict=True):
                tokens = done.outputs[0].token_ids
                said[index] += tokens
                lengths.append(len(tokens))
                digest.update(json.dumps([index, turn, list(tokens)]).encode())
    with open(spec["trace"], "w") as file:
        for step in llm.stats.steps:
            file.write(json.dumps(step) + "\n")
        file.write(json.dumps({"digest": digest.hexdigest(), "output_tokens": lengths}) + "\n")


if __name__ == "__main__":
    run(json.loads(Path(sys.argv[1]).read_text()))
