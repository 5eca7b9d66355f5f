"""How a long prompt is read: sparsely."""
