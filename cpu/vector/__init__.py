"""Declared arguments and scratch memory of kernels, and how a kernel's threads run."""
