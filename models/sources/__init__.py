"""Where models are: files of the user's folder and of the Hugging Face hub's cache, by name."""
