"""Collects facts about this installation and this machine for a bug report."""
