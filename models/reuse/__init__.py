"""Reading prompts of which passages are known from other prompts."""
