"""What reuse of KV costs a model: replays edited conversations under each policy and measures.

Only `measure` imports torch.
"""
