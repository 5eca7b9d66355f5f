"""The server: one model, several sequences, OpenAI's and Anthropic's protocols, a page."""
