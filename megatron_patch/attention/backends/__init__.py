"""One file a backend of ours: a function from an `AttentionCall` to (output, maximum logits)."""
