"""A decoder layer between its matrix products, on the GPU."""
