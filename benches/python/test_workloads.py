"""The Python and the Rust benchmarks measure the same ids."""

from __future__ import annotations

from workloads.documents import document


def by_hand(seed: int, length: int) -> list[int]:
    """Splitmix64 as published, one step at a time on Python's unbounded integers."""
    mask = (1 << 64) - 1
    ids = []
    for _ in range(length):
        seed = (seed + 0x9E3779B97F4A7C15) & mask
        mixed = ((seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9) & mask
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
        ids.append((mixed ^ (mixed >> 31)) >> 47)
    return ids


def test_document_known_values() -> None:
    # The first outputs of splitmix64 from the seed 0, of which an id is the top 17 bits.
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]
    assert document(0, 4).tolist() == [output >> 47 for output in published]
    assert document(0, 4).tolist() == [115777, 56561, 3464, 127255]


def test_document_is_the_published_generator() -> None:
    for seed in (0, 1, 7_919, 1 << 40, (1 << 64) - 1):
        assert document(seed, 100).tolist() == by_hand(seed, 100)


def test_document_from_a_position_is_its_end() -> None:
    assert document(3, 10, start=90).tolist() == document(3, 100)[90:].tolist()
