"""Fresh documents: token ids that nothing else shares."""

import numpy as np
import numpy.typing as npt

VOCABULARY = 1 << 17
BLOCK_SIZE = 16

Tokens = npt.NDArray[np.uint32]

_GAMMA = np.uint64(0x9E37_79B9_7F4A_7C15)
_FIRST = np.uint64(0xBF58_476D_1CE4_E5B9)
_SECOND = np.uint64(0x94D0_49BB_1331_11EB)


def document(seed: int, length: int, start: int = 0) -> Tokens:
    """Token ids below 2**17 (splitmix64), the same as `tokens` of the Rust benchmarks.

    The generator is spelled out here because numpy's own streams may differ between its versions.

    Example:
        >>> document(0, 4).tolist() == document(0, 8)[:4].tolist()
        True
        >>> document(0, 4, start=4).tolist() == document(0, 8)[4:].tolist()
        True
    """
    with np.errstate(over="ignore"):
        state = np.arange(start + 1, start + length + 1, dtype=np.uint64)
        state *= _GAMMA
        state += np.uint64(seed)
        state ^= state >> np.uint64(30)
        state *= _FIRST
        state ^= state >> np.uint64(27)
        state *= _SECOND
        state ^= state >> np.uint64(31)
    return (state >> np.uint64(47)).astype(np.uint32)


def documents(seed: int, count: int, length: int) -> npt.NDArray[np.uint32]:
    """`count` documents with the seeds `seed` to `seed + count - 1`, one per row."""
    rows = np.empty((count, length), dtype=np.uint32)
    for number in range(count):
        rows[number] = document(seed + number, length)
    return rows


def other_first_token(tokens: Tokens) -> Tokens:
    """A copy with another first token: nothing of it is cached."""
    changed = tokens.copy()
    changed[0] ^= 1
    return changed


def other_last_token(tokens: Tokens) -> Tokens:
    """A copy with another last token: all but the last block is cached."""
    changed = tokens.copy()
    changed[-1] ^= 1
    return changed
