"""A tracker without an index: every history is a tuple of ids, every call reads all of them."""

from __future__ import annotations

from dataclasses import dataclass, field

Ids = tuple[int, ...]
Range = tuple[int, int]


def common(a: Ids, b: Ids) -> int:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count


@dataclass(eq=False)
class Kept:
    key: tuple[str, object]
    number: int
    ids: Ids
    num_computed: int
    exact_until: int
    reasoning: tuple[Range, ...]
    kept_at: float
    has_params: bool
    taken: bool = False


@dataclass
class NaiveTracker:
    ttl: float
    max_tokens: int
    max_conversations: int
    kept: list[Kept] = field(default_factory=list)
    recent: list[tuple[str, object]] = field(default_factory=list)
    count: int = 0

    def expire(self, now: float) -> None:
        self._leave([kept for kept in self.kept if now - kept.kept_at >= self.ttl])

    def _leave(self, gone: list[Kept]) -> None:
        self.kept = [kept for kept in self.kept if kept not in gone]
        alive = {kept.key for kept in self.kept}
        self.recent = [key for key in self.recent if key in alive]

    def _used(self, key: tuple[str, object]) -> None:
        self.recent = [each for each in self.recent if each != key] + [key]

    def keep(
        self,
        space: str,
        ids: Ids,
        now: float,
        *,
        num_computed: int,
        exact_until: int = 1 << 60,
        conversation: str | None = None,
        reasoning: tuple[Range, ...] = (),
        has_params: bool = False,
    ) -> None:
        self.expire(now)
        self.count += 1
        key = (space, self.count if conversation is None else conversation)
        replaced = [
            kept
            for kept in self.kept
            if kept.key[0] == space
            and (kept.key == key if conversation else not isinstance(kept.key[1], str))
            and ids[: len(kept.ids)] == kept.ids
            and (has_params or not kept.has_params or kept.taken)
        ]

        def others() -> list[Kept]:
            """Histories that may be dropped, in the order in which they are."""
            keys = [each for each in self.recent if each != key] + [key]
            return [
                kept
                for each in keys
                for kept in self.kept
                if kept.key == each and kept not in replaced
            ]

        def fits() -> bool:
            rest = others()
            size = sum(len(kept.ids) for kept in rest) + len(ids)
            count = len({kept.key for kept in rest} | {key})
            return size <= self.max_tokens and count <= self.max_conversations

        def most() -> str:
            """The namespace that has most of what is short, the new history included."""
            rest = others()
            held = [(kept.key[0], len(kept.ids)) for kept in rest]
            more = len(ids)
            if sum(size for _, size in held) + more <= self.max_tokens:
                held, more = [(each[0], 1) for each in {kept.key for kept in rest} - {key}], 1
            sizes = {one: sum(size for each, size in held if each == one) for one, _ in held}
            return max(sizes, key=lambda one: (sizes[one] + more * (one == space), one == space))

        while not fits():
            leaves = most()
            self._leave([kept for kept in others() if kept.key[0] == leaves][:1])
        self.kept.append(
            Kept(key, self.count, ids, num_computed, exact_until, reasoning, now, has_params)
        )
        self._leave(replaced)
        self._used(key)

    def longest(self, space: str, prompt: Ids, conversation: str | None) -> Kept | None:
        """The history with most in common, whole ones and then the newest first."""
        asked = [
            kept
            for kept in self.kept
            if kept.key[0] == space and conversation in (None, kept.key[1])
        ]
        if not asked:
            return None
        best = max(
            asked,
            key=lambda kept: (
                common(kept.ids, prompt),
                common(kept.ids, prompt) == len(kept.ids),
                kept.number,
            ),
        )
        return best if common(best.ids, prompt) else None

    def compare(
        self, space: str, prompt: Ids, now: float, conversation: str | None, keep_last: int
    ) -> tuple[str, int, int, int, Kept | None]:
        """Kind, usable tokens, tokens in common and of the history, under `EXACT_ONLY`."""
        self.expire(now)
        best = self.longest(space, prompt, conversation)
        if best is None:
            return "start_over", 0, 0, 0, None
        shared = common(best.ids, prompt)
        usable = max(0, min(shared, best.num_computed, best.exact_until, len(prompt) - keep_last))
        if usable == 0:
            return "start_over", 0, shared, 0, None
        kind = "exact_extension" if shared == len(best.ids) else "common_prefix"
        self._used(best.key)
        return kind, usable, shared, len(best.ids), best


def without(ids: Ids, ranges: tuple[Range, ...]) -> Ids:
    return tuple(
        token for at, token in enumerate(ids) if not any(start <= at < end for start, end in ranges)
    )
