"""Messages as they are stored and sent: the envelope, its encoding, its keys."""
