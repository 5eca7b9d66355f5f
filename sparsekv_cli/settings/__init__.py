"""Settings: how an option is declared, and how a session runs."""
