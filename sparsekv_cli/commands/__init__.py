"""Sub-commands: options -> config -> session -> print.

A command of one file is a file here. A command of several files has a folder with its name.
options/ and shared/ hold what several commands share.
"""
