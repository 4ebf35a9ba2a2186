"""Seeded workloads of token ids, the same in every run and, where Rust has them too, in Rust."""
