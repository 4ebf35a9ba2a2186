"""What is read off a Hugging Face model: its config, its RoPE, and the identity of its weights."""
