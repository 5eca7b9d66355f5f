"""What a model takes on this machine, and which method to choose: speeds, plan, auto."""
