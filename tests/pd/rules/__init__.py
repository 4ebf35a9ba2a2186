"""Rules that decide which blocks a transfer copies: those of other engines, and kvtrie's.

Each is written from its description, with a link to the report.
"""
