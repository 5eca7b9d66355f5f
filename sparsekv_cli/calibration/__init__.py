"""What methods measure once a model, and the file that keeps it."""
