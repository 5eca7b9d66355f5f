"""The steps of a decoder layer between its matrix products, on the GPU."""
