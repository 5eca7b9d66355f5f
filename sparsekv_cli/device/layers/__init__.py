"""The layers of a model on a device: their steps, matrices, experts and windows."""
