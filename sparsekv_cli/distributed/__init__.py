"""Work on several machines, by Ray: models that are opened alike, and shards of work for them."""
