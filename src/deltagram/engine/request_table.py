"""What running requests ask of sampling, on the device: written when a request is admitted, read by every step."""

import numpy as np
import numpy.typing as npt
import torch

from deltagram.engine.params import SamplingParams
from deltagram.kernels.sample_tokens import CONSTRAINED, DRAWN, FILTERED, PENALIZED, REPORTED, SPECIAL, Requests

FOREVER = 2**31 - 1  # "until this many output tokens": no limit


class RequestTable:
    """One row a request of `num_rows`, as kernels/sample_tokens reads them; `on_device` are those.

    What is copied from must lie still until the copy has been made: a row's, until its owner has gone. A constraint's
    mask changes from step to step, but only once the token of the step before has come.
    """

    def __init__(self, num_rows: int, vocab_size: int, max_edits: int, device: torch.device) -> None:
        self.on_device = Requests.empty(num_rows, vocab_size, max_edits, device)
        self._staged = self.on_device
        if device.type == "cuda":
            self._staged = Requests(
                *(torch.zeros(part.shape, dtype=part.dtype, pin_memory=True) for part in self.on_device)
            )

    def admit(
        self,
        row: int,
        params: SamplingParams,
        seed: int,
        prompt_length: int,
        end_token_ids: tuple[int, ...],
        constrained: bool,
    ) -> None:
        """Start `row` over. `end_token_ids` are the model's. The host does not wait."""
        edits = [(token, bias, FOREVER) for token, bias in (params.logit_bias or {}).items()]
        if params.min_tokens:
            ends = dict.fromkeys(params.end_token_ids(end_token_ids))
            edits += [(token, -np.inf, params.min_tokens) for token in ends]
        flags = CONSTRAINED * constrained + REPORTED * (params.logprobs is not None)
        flags += SPECIAL * (not params.is_plain_greedy) + PENALIZED * params.uses_penalties
        flags += DRAWN * (params.temperature > 0) + FILTERED * params.uses_filters
        penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        staged = self._staged
        whole = (flags, seed, params.top_k, prompt_length, len(edits), params.logprobs or 0)
        staged.whole[row] = torch.tensor(whole, dtype=torch.int64)
        real = (params.temperature, params.top_p, params.min_p, *penalties)
        staged.real[row] = torch.tensor(real, dtype=torch.float64)
        if edits:
            token, value, until = zip(*edits, strict=True)
            count = len(edits)
            staged.edits[row, 0, :count] = torch.tensor(token, dtype=torch.int32)
            staged.edits[row, 1, :count] = torch.tensor(value, dtype=torch.float32).view(torch.int32)
            staged.edits[row, 2, :count] = torch.tensor(until, dtype=torch.int32)
            self._copy("edits", row)
        self._copy("whole", row)
        self._copy("real", row)

    def allow(self, row: int, allowed: npt.NDArray[np.bool_]) -> None:
        """The tokens [V] that the next step may sample for a constrained row."""
        self._staged.allowed[row] = torch.from_numpy(np.packbits(allowed, bitorder="little"))
        self._copy("allowed", row)

    def _copy(self, part: str, row: int) -> None:
        if self._staged is not self.on_device:
            getattr(self.on_device, part)[row].copy_(getattr(self._staged, part)[row], non_blocking=True)
