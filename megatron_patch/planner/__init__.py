"""What a run will need before it starts: memory, communication, time. See docs/planning.md.

Everything is arithmetic on the configuration: no GPU, no process group, no model.
"""
