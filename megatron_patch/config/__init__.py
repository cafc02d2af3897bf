"""Strict YAML configuration: ``load(path, overrides) -> Loaded`` or ``ConfigError``."""

from megatron_patch.config.loader import load
from megatron_patch.schema.problem import ConfigError, Place, Problem
from megatron_patch.schema.run import Loaded

__all__ = ["ConfigError", "Loaded", "Place", "Problem", "load"]
