"""Topics and durable subscriptions."""
