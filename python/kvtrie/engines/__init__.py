"""Engines that run a model over kvtrie. Each module imports its own heavy dependencies."""
