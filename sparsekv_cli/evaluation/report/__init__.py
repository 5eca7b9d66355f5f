"""A comparison as pictures and as one HTML page."""
