"""The smallest configuration that passes every check."""

MINIMAL = """\
name: demo
model: {num_layers: 2, hidden_size: 64, num_attention_heads: 4, seq_length: 32}
training: {train_steps: 10, global_batch_size: 2, micro_batch_size: 1, device: cpu}
optimizer: {lr: 1e-4}
data: {blend: [{path: corpus}]}
"""
