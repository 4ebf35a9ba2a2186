"""Measures what reuse of KV costs a model: replays edited conversations under each policy.

Of its public modules only `measure` imports torch.
"""
