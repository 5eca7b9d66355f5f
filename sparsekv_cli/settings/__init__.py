"""Settings: the declaration of an option, and the configuration of a session."""
