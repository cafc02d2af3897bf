"""Grouped experts beside core's, which run one after the other."""

import itertools

import pytest
import torch
from megatron_cpu import loss_and_grads, reseed, single_rank, tiny_run

from megatron_patch.core_patches.experts import GroupedMLP, _ends, _Products
from megatron_patch.schema.model import MoEConfig

SWIGLU = {"activation": "swiglu"}


def chunk(grouped, precision, model):
    from megatron_patch.model.build import build_model

    reseed()
    moe = MoEConfig(num_experts=4, ffn_hidden_size=24)
    run = tiny_run(
        {"moe": moe} | model, training={"precision": precision, "grouped_experts": grouped}
    )
    (built,) = build_model(run, vocab_size=60).chunks
    return built.bfloat16() if precision == "bf16" else built


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model", [SWIGLU, {"activation": "gelu"}], ids=["swiglu", "gelu"])
def test_a_model_is_the_same_to_the_bit_and_so_are_its_names(precision, model):
    with single_rank():
        one, all_ = chunk(False, precision, model), chunk(None, precision, model)
        assert any(isinstance(m, GroupedMLP) for m in all_.modules())
        assert not any(isinstance(m, GroupedMLP) for m in one.modules())
        assert {k: v.key for k, v in one.sharded_state_dict().items() if hasattr(v, "key")} == {
            k: v.key for k, v in all_.sharded_state_dict().items() if hasattr(v, "key")
        }
        all_.load_state_dict(one.state_dict())
        (loss, grads), (other, others) = loss_and_grads(one), loss_and_grads(all_)
    assert loss == other and grads.keys() == others.keys()
    for name, grad in grads.items():
        assert torch.equal(grad, others[name]), name


def test_weight_gradients_are_added_to_their_buffers():
    """Of an expert without tokens too; frozen weights have none."""
    x, weights = torch.randn(5, 3, requires_grad=True), [torch.randn(2, 3) for _ in range(3)]
    for weight in weights[:2]:
        weight.requires_grad_()
        weight.main_grad, weight.grad_added_to_main_grad = torch.ones(2, 3), False
    _Products.apply(x, [5, 0, 0], None, True, *weights).sum().backward()
    torch.testing.assert_close(weights[0].main_grad, 1 + x.detach().sum(0).expand(2, 3))
    assert torch.equal(weights[1].main_grad, torch.ones(2, 3)) and weights[2].grad is None
    assert all(w.grad_added_to_main_grad for w in weights[:2])
    torch.testing.assert_close(x.grad, weights[0].detach().sum(0).expand(5, 3))


def test_experts_with_biases_run_one_after_the_other():
    """On one rank they did not run: core added a bias in place to a view."""
    gelu = {"activation": "gelu"}
    with single_rank():
        built = chunk(None, "fp32", {"add_bias_linear": True} | gelu)
        assert not any(isinstance(m, GroupedMLP) for m in built.modules())
        plain = chunk(False, "fp32", gelu)
        built.load_state_dict(plain.state_dict(), strict=False)
        for name, parameter in built.named_parameters():
            if name.endswith("router.bias"):  # the other ones begin at zero
                torch.nn.init.zeros_(parameter)
        (loss, grads), (other, others) = loss_and_grads(built), loss_and_grads(plain)
    assert loss == other
    for name, grad in others.items():
        torch.testing.assert_close(grads[name], grad)
    biases = [g for n, g in grads.items() if n.endswith("linear_fc2.bias")]
    assert biases and any(g.abs().sum() > 0 for g in biases)


def test_weights_that_are_still_gathered_are_waited_for():
    """Core's overlap of the gather hangs on forward hooks of the modules that own weights."""
    with single_rank():
        built, seen = chunk(None, "fp32", SWIGLU), []
        experts = next(m for m in built.modules() if isinstance(m, GroupedMLP)).local_experts
        layers = [x for e in experts for x in (e.linear_fc1, e.linear_fc2)]
        for layer in layers:
            layer.register_forward_pre_hook(lambda module, _: seen.append(module))
        loss_and_grads(built)
    assert {id(x) for x in seen} == {id(x) for x in layers}


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("counts", [[0, 37, 1, 90], [128, 0, 0, 0]], ids=["odd", "one"])
def test_one_launch_is_as_exact_as_a_launch_for_each_expert(counts, fused):
    """Beside float64: outputs, dx and dW, of experts without tokens too."""
    torch.manual_seed(1)
    device = torch.device("cuda")
    x, dy = torch.randn(128, 64, device=device), torch.randn(128, 48, device=device)
    weights = [torch.randn(48, 64, device=device) for _ in counts]

    def result(dtype, ends):
        leaves = [t.to(torch.bfloat16).to(dtype).requires_grad_() for t in (x, *weights)]
        for weight in leaves[1:]:
            weight.main_grad = torch.zeros(weight.shape, dtype=torch.float32, device=device)
            weight.grad_added_to_main_grad = False
        add = fused and dtype == torch.bfloat16
        y = _Products.apply(leaves[0], counts, ends, add, *leaves[1:])
        y.backward(dy.to(torch.bfloat16).to(dtype))
        return [y, leaves[0].grad, *(w.main_grad if add else w.grad for w in leaves[1:])]

    exact = result(torch.float64, None)
    apart = result(torch.bfloat16, None)
    x_16 = x.to(torch.bfloat16)
    together = result(torch.bfloat16, _ends(counts, x_16))
    assert _ends(counts, x_16).tolist() == list(itertools.accumulate(counts))
    for want, one, all_ in zip(exact, apart, together, strict=True):
        floor = 2**-9 * float(want.abs().max())
        assert float((all_ - want).abs().max()) <= 2 * float((one - want).abs().max()) + floor
