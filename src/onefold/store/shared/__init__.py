"""Code that both stores share."""
