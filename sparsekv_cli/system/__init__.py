"""The system that the program runs on: files, memory, and whether there is a GPU."""
