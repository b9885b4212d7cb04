"""Declared tasks: their options, retries and receipts."""
