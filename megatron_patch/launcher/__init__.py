"""From a configuration to a Slurm job: rendering, submitting, preflight, and what runs in a rank."""
