"""Self-evolving, skill-augmented search agents in JAX."""
