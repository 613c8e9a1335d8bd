"""What a config says about rotary embedding, in today's form and in the older one."""

import math
from dataclasses import dataclass
from typing import Any

from deltagram.models.fields import FieldReader


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding. Frequencies of `rotary_dim` dimensions from `theta`; `linear` divides them by `factor`; `yarn`
    blends between plain and divided ones (arXiv 2309.00071) and scales cos and sin by `attention_factor`.

    `attention_factor` is resolved (from `mscale`, `mscale_all_dim` or `factor` where the file leaves it out) and 1.0
    for the other types. `original_max_position_embeddings`, the two betas and `truncate` matter to yarn alone.
    """

    theta: float
    partial_rotary_factor: float
    type: str = "default"  # "default", "linear" or "yarn"
    factor: float = 1.0
    attention_factor: float = 1.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


def read_rope(outer: FieldReader, head_dim: int, max_positions: int, partial: float, notes: list[str]) -> RopeConfig:
    """Reads `rope_parameters`, or the older `rope_scaling`, `rope_theta` and `partial_rotary_factor` beside it.

    `outer` reads the text config, of which `head_dim` and `max_position_embeddings` are given; `partial` is the
    family's default factor. Adds problems to `outer` and lines for the user to `notes`.
    """
    text = outer.values
    name = "rope_scaling" if text.get("rope_scaling") else "rope_parameters"
    values = text.get(name) or {}
    if not isinstance(values, dict):
        outer.problems.append(f"{name} is {values!r}; expected an object")
        values = {}
    nested = sorted(key for key in values if isinstance(values[key], dict))
    outer.check(not nested, f"{name} has one object per layer type ({', '.join(nested)}); expected one for all layers")
    defaults = {"rope_theta": 10000.0, "partial_rotary_factor": partial}
    values = {**defaults, **{key: text[key] for key in defaults if key in text}, **values}
    values.setdefault("rope_type", values.get("type", "default"))
    reader = FieldReader(values, outer.problems, f"{name}.")
    kind = reader.choice("rope_type", "default", ("default", "linear", "yarn"))
    theta = reader.number("rope_theta", above=1.0)
    partial = reader.number("partial_rotary_factor", at_most=1.0)
    rotary_dim = int(head_dim * partial)
    problem = (
        f"partial_rotary_factor {partial:g} of head_dim {head_dim} is {rotary_dim} dimensions; expected an even number"
    )
    reader.bad.update(outer.bad)
    reader.check(rotary_dim >= 2 and rotary_dim % 2 == 0, problem, "partial_rotary_factor", "head_dim")
    scaling: dict[str, Any] = {}
    if kind != "default":
        scaling["factor"] = reader.number("factor")
    if kind == "yarn":
        scaling |= _yarn(reader, text, max_positions, scaling["factor"])
    ignored = sorted(values.keys() - reader.used - {"type", "mrope_section", "mrope_interleaved"} - set(nested))
    if ignored:
        notes.append(f"{name} has fields that rope type {kind!r} ignores: {', '.join(ignored)}")
    return RopeConfig(theta=theta, partial_rotary_factor=partial, type=kind, **scaling)


def _yarn(reader: FieldReader, text: dict[str, Any], max_positions: int, factor: float) -> dict[str, Any]:
    def log_scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    # Beside the scaling fields, the original length of a few configs sits next to max_position_embeddings and wins.
    name = "original_max_position_embeddings"
    original = FieldReader(text, reader.problems) if name in text else reader
    reader.used.add(name)
    scale, scale_all = (reader.number(field, None, or_zero=True) for field in ("mscale", "mscale_all_dim"))
    attention_factor = reader.number("attention_factor", None)
    if attention_factor is None:
        attention_factor = log_scale(scale) / log_scale(scale_all) if scale and scale_all else log_scale(1.0)
    beta_fast, beta_slow = reader.number("beta_fast", None) or 32.0, reader.number("beta_slow", None) or 1.0
    reader.check(beta_fast > beta_slow, f"beta_fast is {beta_fast:g}; expected more than beta_slow, {beta_slow:g}")
    return {
        "attention_factor": attention_factor,
        name: original.integer(name, max_positions),
        "beta_fast": beta_fast,
        "beta_slow": beta_slow,
        "truncate": reader.flag("truncate", True),
    }
