"""Compiled body of gated_mlp.py."""

from deltagram.kernels._cpu_moe import gated_mlp

__all__ = ["gated_mlp"]
