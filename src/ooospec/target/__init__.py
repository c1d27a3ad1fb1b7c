"""The model whose output is reproduced: loading, KV cache, forward passes, verify cost."""
