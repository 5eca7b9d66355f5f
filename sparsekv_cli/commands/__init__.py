"""Sub-commands, one file each: options -> model -> sequence -> print."""
