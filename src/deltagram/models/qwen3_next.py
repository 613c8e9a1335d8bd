"""Qwen3-Next: as Qwen3.5-MoE, but the projections of a Gated DeltaNet lie by key head, and a layer may be dense."""

from deltagram.layers.basic import Factory
from deltagram.models.base import dense_mlp, experts
from deltagram.models.config import Qwen3NextConfig
from deltagram.models.residual import ResidualDecoder


class Qwen3Next(ResidualDecoder):
    """The Qwen3-Next model, with experts in the layers that its config calls sparse."""

    by_key_head = True

    def __init__(self, config: Qwen3NextConfig, max_context: int, make: Factory) -> None:
        layers = range(config.num_hidden_layers)
        mlps = [experts(config, make) if config.is_sparse(i) else dense_mlp(config, make) for i in layers]
        super().__init__(config, max_context, make, mlps)
