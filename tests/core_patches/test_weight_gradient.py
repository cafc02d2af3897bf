"""Weight gradients that the product adds to their buffer."""

import pytest
import torch

from megatron_patch.core_patches.weight_gradient import accumulate, weight_gradient


def test_the_product_is_added_in_place_and_core_takes_it():
    from megatron.core.tensor_parallel import layers

    inputs, gradients = torch.randn(5, 3), torch.randn(5, 2)
    total = torch.ones(2, 3)
    assert weight_gradient.install() and not weight_gradient.install()
    try:
        assert layers._grad_accum_fusion_available
        layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(inputs, gradients, total)
    finally:
        weight_gradient.undo()
    torch.testing.assert_close(total, 1 + gradients.t() @ inputs)
    assert not layers._grad_accum_fusion_available


@pytest.mark.gpu
def test_bf16_into_float32_is_not_rounded_on_the_way():
    inputs, gradients = (torch.randn(512, n, device="cuda").bfloat16() for n in (64, 32))
    buffer = torch.full((32 * 64 + 1,), 0.5, device="cuda")
    total = buffer[1:].view(32, 64)
    accumulate(inputs, gradients, total)
    exact = gradients.double().t() @ inputs.double() + 0.5
    assert buffer[0] == 0.5
    assert (total.double() - exact).norm() < 2.0**-18 * exact.norm()
