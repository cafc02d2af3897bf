"""From a configuration to a Slurm job: rendering, submitting, preflight, rank start-up."""
