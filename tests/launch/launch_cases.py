"""Configurations and jobs of the launch tests, on paths that no machine has."""

from __future__ import annotations

from pathlib import Path

from megatron_patch import config
from megatron_patch.launcher.render import Job

HOME = Path("/home/ada/project")
MODEL = """\
name: {name}
model: {{num_layers: 8, hidden_size: 64, num_attention_heads: 8, seq_length: 32}}
training: {{train_steps: 100, global_batch_size: 3840, micro_batch_size: 1, device: {device}}}
optimizer: {{lr: 1e-3}}
data: {{blend: [{{path: corpus}}]}}
attention: {{backend: reference}}
"""


def loaded(folder: Path, cluster: str = "", *, sets: tuple[str, ...] = (), device: str = "cuda"):
    """A checked configuration whose cluster section is ``cluster`` (YAML, indented by two)."""
    path = folder / "run.yaml"
    text = MODEL.format(name="demo", device=device)
    path.write_text(text + (f"cluster:\n{cluster}" if cluster else ""))
    return config.load(path, list(sets))


def job(run, nodes: int) -> Job:
    """A job of ``run`` in a home directory."""
    return Job(run=run, nodes=nodes, work_dir=HOME, run_dir=HOME / "runs" / run.name)
