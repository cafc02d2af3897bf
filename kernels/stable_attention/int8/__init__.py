"""INT8 attention that trains (SageBwd, arXiv 2603.02170): settings, kernels and their launches."""
