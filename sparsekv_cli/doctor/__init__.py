"""The facts of this installation and this machine that a bug report needs."""
