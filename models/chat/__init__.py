"""Chat templates, rendered with limits on work and memory."""
