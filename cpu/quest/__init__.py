"""Quest: page summaries and scores."""
