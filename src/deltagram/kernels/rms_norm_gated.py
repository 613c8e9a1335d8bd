"""RMS norm of each value head, then a gate: what follows the gated delta rule.

    y = weight * x / sqrt(mean(x^2) + eps) * act(z)

Shapes: x, z [T, HV, V]; weight [V]; act is silu or sigmoid. Returns [T, HV, V] in z's dtype; arithmetic in fp32 (float64 for
float64 inputs). The weight is plain here, not 1 + w as in these models' other norms.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm_gated(x: Tensor, z: Tensor, weight: Tensor, eps: float, activation: str) -> Tensor:
    """See the file's docstring. Raises ValueError for an activation other than 'silu' and 'sigmoid'."""
    if activation not in ("silu", "sigmoid"):
        raise ValueError(f"the gate's activation must be 'silu' or 'sigmoid', got {activation!r}")
    return _reference(x, z, weight, eps, activation)


def _reference(x: Tensor, z: Tensor, weight: Tensor, eps: float, activation: str) -> Tensor:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    gate = z.to(dtype)
    gate = F.silu(gate) if activation == "silu" else gate.sigmoid()
    return (F.rms_norm(x.to(dtype), x.shape[-1:], weight.to(dtype), eps) * gate).to(z.dtype)
