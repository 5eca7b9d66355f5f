"""SALS: latent keys and quantised values."""
