"""What reuse of KV costs a model: replays edited conversations under each policy and measures.

`recall` holds the built-in conversations, `policies` the names of what is compared, `models` the
small models that are shipped; none of them imports torch. `measure` does.
"""
