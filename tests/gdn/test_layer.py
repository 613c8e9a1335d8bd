"""The layer against transformers' own, fp32: prompt, resumed chunks and decode."""

import importlib

import pytest
import torch

from deltagram.gdn.core import LayerState
from deltagram.gdn.layer import GatedDeltaNet
from deltagram.gdn.state import allocate, ring_length
from deltagram.layers.basic import Factory
from deltagram.step.history import TokenHistory
from deltagram.step.plan import Bucket, Entry, Kind, StepPlan
from deltagram.step.sequences import SequenceTable, pack, prepare

transformers = pytest.importorskip("transformers")
HIDDEN, HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 48, 2, 6, 16, 8
FAMILIES = {
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5GatedDeltaNet", {}),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextGatedDeltaNet", {}),
    "qwen4_exp": ("Qwen4ExpTextConfig", "Qwen4ExpTextGatedDeltaNet", {"output_gate_type": "sigmoid"}),
}


def table_of(kind: Kind, start: int, size: int, pad: int) -> SequenceTable:
    """One sequence, in slot 1 of 2, with `pad` rows of padding."""
    history = TokenHistory(3, 256, torch.device("cpu"))
    history.lengths[1] = start + 1
    bucket = Bucket(size + pad, 1 + pad, kind is Kind.PREFILL)
    packed = pack(StepPlan(0, bucket, (Entry(1, 0, 1, kind, size, start),)), 64, 2, 2)
    return prepare(torch.from_numpy(packed), bucket, history, torch.zeros(3, 4, dtype=torch.int32), 64)


@pytest.mark.oracle
@pytest.mark.parametrize("family", FAMILIES)
def test_layer_is_transformers(family: str) -> None:
    torch.manual_seed(0)
    config_name, layer_name, extra = FAMILIES[family]
    config = getattr(transformers, config_name)(
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=HEADS,
        linear_num_value_heads=VALUE_HEADS,
        linear_key_head_dim=KEY_DIM,
        linear_value_head_dim=VALUE_DIM,
        linear_conv_kernel_dim=4,
        **extra,
    )
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    theirs = getattr(module, layer_name)(config, 0).float().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    gate = extra.get("output_gate_type", "silu")
    make = Factory(torch.device("cpu"), torch.float32)
    ours = GatedDeltaNet(HIDDEN, HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, 4, config.rms_norm_eps, gate, make)
    parameters = {name: tensor.detach() for name, tensor in theirs.named_parameters()}
    for name, target in (ours.by_key_head("x") if family == "qwen3_next" else ours.tensors("x")).items():
        parts = target if isinstance(target, tuple) else (target,)
        values = parameters.pop(name.removeprefix("x."))
        for part, rows in zip(parts, values.split([len(part) for part in parts]), strict=True):
            part.copy_(rows)
    assert not parameters
    ours.state = LayerState(
        allocate(2, (VALUE_HEADS, VALUE_DIM, KEY_DIM), torch.float32, torch.device("cpu"), poison=True),
        allocate(2, (ring_length(3, 0), ours.channels), torch.float32, torch.device("cpu"), poison=True),
    )
    x = torch.randn(150, HIDDEN)
    with torch.inference_mode():
        expected = theirs(x[None])[0]
        for begin, end in ((0, 2), (2, 3), (3, 67), (67, 130), *((t, t + 1) for t in range(130, 150))):
            kind = Kind.PREFILL if begin < 130 else Kind.DECODE
            padding = torch.full((3, HIDDEN), float("nan"))
            y = ours(torch.cat([x[begin:end], padding]), table_of(kind, begin, end - begin, 3))
            error = (y[: end - begin] - expected[begin:end]).abs().max()
            assert error <= 1e-5 * expected.abs().max(), (begin, end)
            assert torch.equal(y[end - begin :], torch.zeros(3, HIDDEN))
