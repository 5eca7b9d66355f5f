"""The forms of requests and answers: fields, items of conversations, calls of tools."""
