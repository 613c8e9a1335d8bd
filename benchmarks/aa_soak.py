"""A/A on the shipped model, 20 times: how often does `deltagram compare` find a winner between an arm and itself?

Each time is a whole experiment of docs/examples/decode-aa.toml with block orders of its own: fresh launches, the block
log-ratios, the verdict. At a nominal 5 % one winner is expected and four or more are a sign that something is wrong
(probability 1.6 %). About 25 minutes; going on after an interruption is the same command.

    python benchmarks/aa_soak.py [--times 20] [--out experiments/aa-soak]
"""

import argparse
from pathlib import Path

from environment import save

from deltagram.experiments.compare import compare
from deltagram.experiments.read_plan import parse_plan
from deltagram.experiments.records import floors, unfinished

PLAN = Path(__file__).parents[1] / "docs" / "examples" / "decode-aa.toml"
WINNERS = 3  # at most, of 20


class Silent:
    def launching(self, *_: object) -> None: ...

    def launched(self, *_: object) -> None: ...

    def looked(self, *_: object) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("experiments/aa-soak"))
    options = parser.parse_args()
    cells = []
    for time in range(options.times):
        plan = parse_plan(PLAN.read_text().replace("[design]", f"[design]\nseed = {time}"), PLAN.parent)
        done = floors(options.out, plan)
        if not done:
            try:
                unfinished(options.out, plan, aa=True)
                resume = True
            except ValueError:
                resume = False
            outcome = compare(plan, options.out, aa=True, resume=resume, progress=Silent())
            if outcome.result["state"] != "done":
                raise SystemExit(f"{outcome.record.folder}: {outcome.result['state']}, {outcome.result['reason']}")
            done = floors(options.out, plan)
        cell = done[-1]["cells"]["all"]
        cells.append(cell)
        low, high = cell["interval"]
        print(f"{time + 1:>2} of {options.times}: {cell['verdict']:<10} {low:+.1%} to {high:+.1%}", flush=True)
    verdicts = [cell["verdict"] for cell in cells]
    winners = verdicts.count("faster") + verdicts.count("slower")
    keys = ("verdict", "speedup", "interval", "p_value", "sign_flip_p_value", "resolution", "block_sd")
    results = {
        "plan": PLAN.name,
        "experiments": len(cells),
        "winners": winners,
        "at_most": WINNERS,
        "blocks_each": cells[0]["blocks"],
        "runs": [{key: cell[key] for key in keys} for cell in cells],
    }
    print(f"{winners} winners in {len(cells)}; results in {save('aa_soak', results)}")
    if winners > WINNERS:
        raise SystemExit(f"{winners} winners; expected at most {WINNERS}")


if __name__ == "__main__":
    main()
