"""Methods against each other, and against the machine."""
