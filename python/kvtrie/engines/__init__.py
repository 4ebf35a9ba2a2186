"""Engines that run a model over kvtrie; each one imports its own heavy dependencies."""
