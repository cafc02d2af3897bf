"""Which function the MLPs get, and what the compiled ones are worth against float64."""

import pytest
import torch
import torch.nn.functional as F
from error_bound import check
from megatron_cpu import fused, loss_and_grads, tiny_run
from stream_cases import alone

from megatron_patch.core_patches import activation
from megatron_patch.schema.model import MoEConfig

pytestmark = pytest.mark.usefixtures("rank")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_squared_relu_against_float64(compiles, dtype):
    """Ordinary and large values, exact zeros, and what is not finite."""
    ours, plain = activation.fused_squared_relu, activation.squared_relu
    x = torch.cat([torch.randn(500), torch.linspace(-12, 12, 400), torch.zeros(3)]).to(dtype)
    dout = torch.randn(x.shape).to(dtype)
    found, peer = alone(ours, x, dout), alone(plain, x, dout)
    exact = alone(plain, x.double(), dout.double())
    assert [f.dtype for f in found] == [dtype, dtype]
    check(found, peer, exact, floor=2 * torch.finfo(torch.float32).eps)
    for value in (float("inf"), float("nan")):
        odd = torch.tensor([value], dtype=dtype)
        assert torch.equal(ours(odd).isfinite(), plain(odd).isfinite())


MOE = MoEConfig(num_experts=4)


@pytest.mark.parametrize(("model", "on", "expected"), [
    ({"activation": "gelu"}, True, F.gelu),
    ({"activation": "gelu"}, False, F.gelu),
    ({"activation": "gelu", "add_bias_linear": True}, True, F.gelu),
    ({"activation": "gelu", "moe": MOE}, True, F.gelu),
    ({"activation": "squared_relu"}, True, activation.fused_squared_relu),
    ({"activation": "squared_relu", "moe": MOE}, True, activation.squared_relu),
    ({"activation": "squared_relu"}, False, activation.squared_relu),
    ({"activation": "relu"}, True, F.relu),
    ({"activation": "swiglu"}, True, F.silu),
])  # fmt: skip
def test_which_one_a_model_gets(model, on, expected):
    run = tiny_run(model, training={"compile_fusions": on})
    assert activation.activation_function(run) is expected
    mlp = fused(model, on=on).decoder.layers[0].mlp
    assert model.get("moe") or mlp.activation_func is expected


@pytest.mark.parametrize("name", ["swiglu", "gelu_tanh", "gelu"])
def test_experts_with_biases_train_with_fusions_as_without(name):
    """Core has no fused activation for them, and raised in the first step of a GPU run."""
    experts = MoEConfig(num_experts=2, ffn_hidden_size=16)
    model = {"activation": name, "add_bias_linear": True, "moe": experts}
    found, plain = (loss_and_grads(fused(model, on=on, precision="fp32")) for on in (True, False))
    assert found[0] == pytest.approx(plain[0], rel=1e-6) and found[1].keys() == plain[1].keys()
    for parameter, gradient in found[1].items():
        torch.testing.assert_close(gradient, plain[1][parameter], rtol=1e-4, atol=1e-6)


def test_on_a_gpu_fusions_are_the_default_and_leave_gelu_exact():
    gelu = {"activation": "gelu", "add_bias_linear": True}
    default = tiny_run(gelu, training={"device": "cuda"})
    assert default.training.compiles_fusions and not activation.core_fuses(default)
    asked = tiny_run(gelu, training={"device": "cuda", "compile_fusions": True})
    assert activation.core_fuses(asked)
    assert not tiny_run(gelu).training.compiles_fusions
