"""Qwen3.5-MoE: Qwen3.5 with experts."""

from deltagram.layers.basic import Factory
from deltagram.models.base import experts
from deltagram.models.config import Qwen35MoeConfig
from deltagram.models.residual import ResidualDecoder


class Qwen35Moe(ResidualDecoder):
    """The Qwen3.5-MoE text model, with experts in every layer."""

    def __init__(self, config: Qwen35MoeConfig, max_context: int, make: Factory) -> None:
        mlps = [experts(config, make) for _ in range(config.num_hidden_layers)]
        super().__init__(config, max_context, make, mlps)
