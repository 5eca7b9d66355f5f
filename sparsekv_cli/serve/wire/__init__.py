"""The server's input from the network: connections, heads and bodies, all with limits."""
