"""Qwen3.5 (dense): Gated DeltaNet and full attention layers on a plain residual."""

from deltagram.layers.basic import Factory
from deltagram.models.base import dense_mlp
from deltagram.models.config import Qwen35Config
from deltagram.models.residual import ResidualDecoder


class Qwen35(ResidualDecoder):
    """The Qwen3.5 text model, with a gated MLP in every layer."""

    def __init__(self, config: Qwen35Config, max_context: int, make: Factory) -> None:
        mlps = [dense_mlp(config, make) for _ in range(config.num_hidden_layers)]
        super().__init__(config, max_context, make, mlps)
