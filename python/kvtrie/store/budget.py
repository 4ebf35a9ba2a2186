"""Which stored runs leave when there is no room: those whose bytes save least.

A run's worth per byte is what recomputing it costs, times how often it was asked for, plus the
worth of what was evicted last (greedy dual size frequency), so that what nobody asks for ages.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

# Tokens before a token at which attention to them costs as much as all else of the token.
_EVEN: Final = 8192


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """What a tenant may keep in a store.

    Args:
        max_bytes: Bytes of all its runs that this process knows of; None for the store's bound.
        lifetime: Seconds after which a run is not used and is deleted; None for no end.

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
    cost: float
    written: int
    exactness: tuple[int, int] | None
    uses: int = 0
    worth: float = 0.0


class Budget:
    """The runs that this process knows to be stored, in the order in which they leave."""

    def __init__(self) -> None:
        self._runs: dict[str, _Stored] = {}
        self._order: dict[str, list[tuple[float, str]]] = defaultdict(list)
        self._of_tenant: dict[str, int] = defaultdict(int)
        self._runs_of_tenant: dict[str, int] = defaultdict(int)
        self._floor = 0.0
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
        num_tokens: int,
        start: int,
        written: int,
        exactness: tuple[int, int] | None,
    ) -> None:
        """Count a run that was stored, in place of what had its name."""
        uses = self._runs[name].uses if name in self._runs else 0
        self.remove(name)
        cost = num_tokens * (1 + (start + num_tokens / 2) / _EVEN)
        tenant = name.partition("/")[0]
        run = _Stored(tenant, num_bytes, cost, written, exactness, uses)
        self._runs[name] = run
        self.num_bytes += num_bytes
        self._of_tenant[tenant] += num_bytes
        self._runs_of_tenant[tenant] += 1
        self._rank(name, run)

    def touch(self, name: str) -> None:
        """Count a use."""
        run = self._runs.get(name)
        if run is not None:
            run.uses += 1
            self._rank(name, run)

    def remove(self, name: str) -> None:
        """Forget a run, if it is known."""
        run = self._runs.pop(name, None)
        if run is None:
            return
        self.num_bytes -= run.num_bytes
        self._of_tenant[run.tenant] -= run.num_bytes
        self._runs_of_tenant[run.tenant] -= 1
        if not self._runs_of_tenant[run.tenant]:
            del self._of_tenant[run.tenant], self._runs_of_tenant[run.tenant]
            self._order.pop(run.tenant, None)

    def leaving(self, tenant: str | None) -> str | None:
        """The run that leaves next, of one tenant or of all; None if there is none."""
        tenants = [tenant] if tenant is not None else list(self._order)
        heads = [head for one in tenants if (head := self._head(one)) is not None]
        if not heads:
            return None
        worth, name = min(heads)
        self._floor = max(self._floor, worth)
        return name

    def older_than(self, tenant_ends: dict[str, int], default: int) -> Iterator[str]:
        """Runs that were written before a moment, of a tenant's own or the default."""
        for name, run in self._runs.items():
            if run.written < tenant_ends.get(run.tenant, default):
                yield name

    def _rank(self, name: str, run: _Stored) -> None:
        run.worth = self._floor + (1 + run.uses) * run.cost / run.num_bytes
        order = self._order[run.tenant]
        heapq.heappush(order, (run.worth, name))
        if len(order) > 4 * self._runs_of_tenant[run.tenant] + 64:
            order[:] = {one for one in order if self._is_current(*one)}
            heapq.heapify(order)

    def _head(self, tenant: str) -> tuple[float, str] | None:
        order = self._order.get(tenant, [])
        while order:
            worth, name = order[0]
            if self._is_current(worth, name):
                return worth, name
            heapq.heappop(order)
        self._order.pop(tenant, None)
        return None

    def _is_current(self, worth: float, name: str) -> bool:
        run = self._runs.get(name)
        return run is not None and run.worth == worth
