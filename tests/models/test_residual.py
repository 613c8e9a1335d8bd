"""Nobody reads a residual that a product has been added to: on a GPU the sum may lie in its place."""

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from deltagram import LLM, SamplingParams
from deltagram.layers import basic, mlp
from deltagram.testing.checkpoints import write_tiny_checkpoint

Op = Callable[..., tuple[Tensor, Tensor]]


def watched(op: Op, calls: list[int], poison: bool) -> Op:
    def called(residual: Tensor, *arguments: object) -> tuple[Tensor, Tensor]:
        made = op(residual, *arguments)
        calls.append(len(residual))
        if poison:
            residual.fill_(float("nan"))
        return made

    return called


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_residuals_are_used_up(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks, decoding, and drafts of the model's own head."""
    folder = write_tiny_checkpoint(tmp_path, family, mtp=True)
    prompts = [[5 + i % 90 for i in range(length)] for length in (3, 70, 150)]
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)

    def run(poison: bool) -> tuple[list[tuple[int, ...]], list[int]]:
        """The tokens, and the rows of each product: with other drafts these would be others."""
        calls: list[int] = []
        with monkeypatch.context() as patch:
            patch.setattr(basic, "linear_onto", watched(basic.linear_onto, calls, poison))
            patch.setattr(mlp, "gated_mlp_onto", watched(mlp.gated_mlp_onto, calls, poison))
            llm = LLM(
                folder, device="cpu", dtype="float32", max_context=256, max_num_sequences=3, max_num_tokens=80,
                speculation="mtp", num_draft=2, adaptive_drafts=False,
            )  # fmt: skip
            made = llm.generate(prompts, params)
        return [tuple(completion.outputs[0].token_ids) for completion in made], calls

    expected = run(poison=False)
    assert len(expected[1]) > 50 and run(poison=True) == expected
