"""Sub-commands of sparsekv-cli. Each reads options, opens a model, runs a sequence and prints.

A command with one file is a file here. A command with several files has a folder of its name.
options/ and shared/ have the code that several commands use.
"""
