"""The worker: claims messages, runs their handlers, settles them."""
