"""What several commands share beside their options: prompt, answer, progress and output."""
