"""Rules that decide which blocks a transfer copies: those of the peers, and kvtrie's.

Each is written from its description, and says where it was reported.
"""
