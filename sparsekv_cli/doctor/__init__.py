"""What a bug report needs to know of this installation and this machine."""
