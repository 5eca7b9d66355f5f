"""Speeds and memory of a model on this machine, and the choice of a method: speeds, plan, auto."""
