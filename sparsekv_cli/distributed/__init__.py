"""Work on several machines, by Ray: sessions that are alike, and shards of work for them."""
