import pytest
import torch

from megatron_patch.core_patches import activation, cross_entropy, norms, residual


@pytest.fixture
def compiles(monkeypatch):
    """Traced, decomposed, split into passes; `test_compiled_gpu.py` has what a GPU makes of it."""
    torch.compiler.set_stance("default")  # CPU mode runs eagerly
    for owner in (activation, norms, residual, cross_entropy):
        for name in [n for n in vars(owner) if n.startswith("_compiled_")]:
            function = getattr(owner, name.replace("_compiled", ""))
            traced = torch.compile(function, backend="aot_eager_decomp_partition", dynamic=False)
            monkeypatch.setattr(owner, name, traced)
    yield
    torch.compiler.set_stance("force_eager")
