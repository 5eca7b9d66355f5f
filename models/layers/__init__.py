"""Parts of some layers: experts, recurrent parts, windows and per-layer inputs."""
