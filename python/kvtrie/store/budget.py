"""Which stored runs leave when there is no room: those least recently used.

A prompt asks for all that its conversation has stored, again at each turn, and never again once
the conversation is over. So when a run was used says more than how often. A run is used when it is
stored or read. One that is offered again at the end of a turn was used by its prompt: unless it was
read since the last offer, the pool has supplied it, and it is used then. A turn counts once, and by
its prompt where the store knows it: what ends says little of what is asked for next.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """What a tenant may keep in a store.

    Args:
        max_bytes: Bytes of all its runs that this process knows of; None for the store's bound.
        lifetime: Seconds after which a run is not used; None for no end. A process that writes
            deletes such runs within a minute, if it knows of them (`SpanStore.sweep`).

    Raises:
        ValueError: A limit is below 1.
    """

    max_bytes: int | None = None
    lifetime: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_bytes", "lifetime"):
            value = getattr(self, name)
            if value is not None and not value >= 1:
                msg = f"TenantLimits: {name} is {value}; it must be at least 1"
                raise ValueError(msg)


@dataclass(slots=True)
class _Stored:
    """A run that is in the store."""

    tenant: str
    num_bytes: int
    written: int
    exactness: tuple[int, int] | None
    was_read: bool = False


class Budget:
    """The runs that this process knows to be stored, in the order in which they leave."""

    def __init__(self) -> None:
        self._runs: dict[str, _Stored] = {}
        # In the order of their last use: all runs, and each tenant's.
        self._order: OrderedDict[str, None] = OrderedDict()
        self._tenant_order: dict[str, OrderedDict[str, None]] = defaultdict(OrderedDict)
        self._of_tenant: dict[str, int] = defaultdict(int)
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._runs)

    def __contains__(self, name: str) -> bool:
        return name in self._runs

    def entry(self, name: str) -> object | None:
        """What stands for a run as it was stored last; None if it is not known."""
        return self._runs.get(name)

    def exactness(self, name: str) -> tuple[int, int] | None:
        """Approximate tokens and hops of a run; None if they are not known."""
        found = self._runs.get(name)
        return None if found is None else found.exactness

    def doubt(self, name: str) -> None:
        """Take a run, if it is known, for worse than any other of its name."""
        run = self._runs.get(name)
        if run is not None:
            run.exactness = (1 << 62, 0)

    def tenant_bytes(self, tenant: str) -> int:
        """Bytes of a tenant's runs."""
        return self._of_tenant.get(tenant, 0)

    def add(
        self,
        name: str,
        *,
        num_bytes: int,
        written: int,
        exactness: tuple[int, int] | None,
    ) -> None:
        """Count a run that was stored, in place of what had its name."""
        self.remove(name)
        tenant = name.partition("/")[0]
        self._runs[name] = _Stored(tenant, num_bytes, written, exactness)
        self.num_bytes += num_bytes
        self._of_tenant[tenant] += num_bytes
        self._touch(name, tenant)

    def read(self, name: str, exactness: tuple[int, int]) -> None:
        """Count a use by a prompt that the store supplies, and keep how exact the run is."""
        run = self._runs.get(name)
        if run is not None:
            run.was_read = True
            if run.exactness is None:
                run.exactness = exactness
            self._touch(name, run.tenant)

    def offered(self, name: str) -> None:
        """Count a use by a turn that has ended, unless it was read for it."""
        run = self._runs.get(name)
        if run is not None:
            if not run.was_read:
                self._touch(name, run.tenant)
            run.was_read = False

    def rewritten(self, name: str, written: int) -> None:
        """Take a later time as that of a known run: another process has written it again."""
        run = self._runs.get(name)
        if run is not None:
            run.written = max(run.written, written)

    def postpone(self, name: str) -> None:
        """Name a run, if it is known, after all others: as one to leave, and as one that is old."""
        run = self._runs.pop(name, None)
        if run is not None:
            self._runs[name] = run
            self._touch(name, run.tenant)

    def _touch(self, name: str, tenant: str) -> None:
        for order in (self._order, self._tenant_order[tenant]):
            order[name] = None
            order.move_to_end(name)

    def remove(self, name: str) -> None:
        """Forget a run, if it is known."""
        run = self._runs.pop(name, None)
        if run is None:
            return
        self.num_bytes -= run.num_bytes
        self._of_tenant[run.tenant] -= run.num_bytes
        del self._order[name]
        order = self._tenant_order[run.tenant]
        del order[name]
        if not order:
            del self._of_tenant[run.tenant], self._tenant_order[run.tenant]

    def leaving(self, tenant: str | None) -> str | None:
        """The run that leaves next, of one tenant or of all; None if there is none."""
        order = self._order if tenant is None else self._tenant_order.get(tenant)
        return next(iter(order or ()), None)

    def is_old(self, name: str, tenant_ends: dict[str, int], default: int) -> bool:
        """Whether a known run was written before a moment: its tenant's, or the default."""
        run = self._runs.get(name)
        return run is not None and run.written < tenant_ends.get(run.tenant, default)

    def older_than(self, tenant_ends: dict[str, int], default: int) -> Iterator[str]:
        """All runs that are old (`is_old`). Those that were postponed come last."""
        return (name for name in self._runs if self.is_old(name, tenant_ends, default))
