"""Copies inside KV pools; the plain-torch reference defines what each one means."""
