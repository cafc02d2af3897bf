"""Controlled experiments through the real trainer, and probes of tensors they captured."""
