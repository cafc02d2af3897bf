"""The keys of a configuration: one file a section, each a frozen dataclass with its help.

The ground floor: nothing here imports another room of the package. Rules between sections are in
`megatron_patch.config.checks`.
"""
