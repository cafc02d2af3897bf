"""The configurations we ship pass every check; values out of proportion are refused in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_patch import config

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=[path.stem for path in SHIPPED])
def test_shipped_configurations_pass(path: Path) -> None:
    loaded = config.load(path)
    assert loaded.config.name


def test_gpt2_124m_is_gpt2_124m() -> None:
    """The shape of the 2019 model: its parameter count with GPT-2's vocabulary is 124,439,808."""
    model = config.load(ROOT / "configs" / "gpt2_124m.yaml").config.model
    width, layers = model.hidden_size, model.num_layers
    assert (model.position_embedding, model.normalization) == ("learned_absolute", "LayerNorm")
    assert (model.activation, model.tie_embeddings) == ("gelu", True)
    assert model.add_bias_linear
    assert model.add_qkv_bias
    per_layer = 12 * width**2 + 13 * width  # matrices, then biases and the two norms
    assert (50257 + model.seq_length) * width + layers * per_layer + 2 * width == 124_439_808


@pytest.mark.parametrize(("override", "path"), [
    # Each of these once ended `config check` in a traceback or in hours of counting.
    ("model.num_layers=9223372036854775807", "model.num_layers"),
    ("model.rotary_percent=1e308", "model.rotary_percent"),
    ("checkpoint.load_from=" + "x" * 3000, "checkpoint.load_from"),
    ("checkpoint.hmac_key_file=/dev/zero", "checkpoint.hmac_key_file"),
])  # fmt: skip
def test_values_out_of_all_proportion_are_refused_in_words(override: str, path: str) -> None:
    with pytest.raises(config.ConfigError) as caught:
        config.load(ROOT / "configs" / "quickstart.yaml", [override])
    assert path in {problem.path for problem in caught.value.problems}


def test_a_long_directory_name_is_no_crash() -> None:
    """Path.is_file() raises for it; the directory is made, or not, when training starts."""
    long = "x" * 3000
    loaded = config.load(ROOT / "configs" / "quickstart.yaml", [f"checkpoint.directory={long}"])
    assert loaded.config.checkpoint.directory == long
