"""What reuse of KV costs a model: replays edited conversations under each policy and measures.

Of its public modules only `measure` imports torch.
"""
