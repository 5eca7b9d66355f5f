"""FreeKV: pages and their recall."""
