"""Values out of proportion are refused in words; tests/golden loads every shipped configuration."""

from pathlib import Path

import pytest

from megatron_patch import config

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("override", "path"), [
    # Each of these once ended a command in a traceback or in hours of counting.
    ("model.num_layers=9223372036854775807", "model.num_layers"),
    ("model.rotary_percent=1e308", "model.rotary_percent"),
    ("model.mtp.num_layers=100000000", "model.mtp.num_layers"),  # `plan` counts depths and experts
    ("model.moe.num_experts=100000000", "model.moe.num_experts"),
    ("model.make_vocab_size_divisible_by=9223372036854775807",
     "model.make_vocab_size_divisible_by"),
    ("parallel.distributed_timeout_minutes=1e300", "parallel.distributed_timeout_minutes"),
    ("parallel.distributed_timeout_minutes=1e-300", "parallel.distributed_timeout_minutes"),
    # These trained on, with activations of zero: float32 has no such number.
    ("model.norm_epsilon=1e300", "model.norm_epsilon"),
    ("model.norm_epsilon=1e-300", "model.norm_epsilon"),
    ("model.rotary_base=1e300", "model.rotary_base"),
    ("model.init_std=1e300", "model.init_std"),
    ("checkpoint.load_from=" + "x" * 3000, "checkpoint.load_from"),
    ("checkpoint.hmac_key_file=/dev/zero", "checkpoint.hmac_key_file"),
])  # fmt: skip
def test_values_out_of_all_proportion_are_refused_in_words(override, path, tmp_path):
    # The quick start's own directory may hold its run, and a run that resumes needs no load_from.
    with pytest.raises(config.ConfigError) as caught:
        config.load(ROOT / "configs" / "quickstart.yaml", [override, f"run_dir={tmp_path}"])
    assert path in {problem.path for problem in caught.value.problems}


def test_a_long_directory_name_is_no_crash():
    """Path.is_file() raises for it; the directory is made, or not, when training starts."""
    long = "x" * 3000
    loaded = config.load(ROOT / "configs" / "quickstart.yaml", [f"checkpoint.directory={long}"])
    assert loaded.config.checkpoint.directory == long
