"""One small file a backend of ours: a function from a `Call` to (output, maximum logits)."""
