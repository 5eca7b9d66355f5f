"""Compares methods with each other, and their speed with what the machine allows."""
