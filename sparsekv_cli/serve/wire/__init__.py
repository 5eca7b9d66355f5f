"""What the server takes from the network: connections, heads and bodies, all with limits."""
