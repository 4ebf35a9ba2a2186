"""What reuse of KV costs a model: replays edited conversations under each policy and measures.

`recall` has the built-in conversations, `policies` the names of policies, `models` the shipped
small models; none of them imports torch. `measure` does.
"""
