"""From a model name to weights on disk."""
