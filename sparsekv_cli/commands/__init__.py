"""Sub-commands, one file each: options -> config -> session -> print."""
