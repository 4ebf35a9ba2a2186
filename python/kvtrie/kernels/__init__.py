"""Copies inside KV pools; the plain-torch reference is their definition."""
