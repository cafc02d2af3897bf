"""The smallest configuration that passes every check, and one of a run of 20 steps."""

MINIMAL = """\
name: demo
model: {num_layers: 2, hidden_size: 64, num_attention_heads: 4, seq_length: 32}
training: {train_steps: 10, global_batch_size: 2, micro_batch_size: 1, device: cpu}
optimizer: {lr: 1e-4}
data: {blend: [{path: corpus}]}
"""

TINY = """\
name: tiny
model: {num_layers: 2, hidden_size: 64, num_attention_heads: 4, seq_length: 32}
training: {device: cpu, precision: fp32, train_steps: 20, global_batch_size: 8, micro_batch_size: 2}
optimizer: {lr: 1.0e-3}
data: {blend: [{path: tiny}], tokenizer: {kind: bytes}}
attention: {backend: reference}
"""
