"""Training data, training and evaluation of a sidecar."""
