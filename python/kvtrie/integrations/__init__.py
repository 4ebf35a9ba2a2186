"""kvtrie inside serving engines, loaded by their configuration."""
