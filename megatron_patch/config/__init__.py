"""Strict YAML configuration: ``load(path, overrides) -> Loaded`` or ``ConfigError``."""

# The root dataclass is not imported here: it imports every room's section, and those import
# ``Problem`` from this package.
from megatron_patch.config.loader import Loaded, load
from megatron_patch.schema.problem import ConfigError, Place, Problem

__all__ = ["ConfigError", "Loaded", "Place", "Problem", "load"]
