"""Shows a comparison as pictures and as one HTML page."""
