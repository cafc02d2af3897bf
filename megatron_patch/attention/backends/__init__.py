"""One small file a backend: a function from a `Call` to (output, maximum logits)."""
