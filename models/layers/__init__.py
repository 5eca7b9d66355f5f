"""What layers may have of their own: experts, and recurrent parts in place of attention."""
