"""Many transfers with random faults, every slot checked, and counts of what occurred.

    python -m tests.pd.soak --transfers 1000000

Episodes of two serving engines with ledgers and indexes, and transfers of several block groups
between engines without. What finds a wrong label prints the call that shows it again, and the exit
status is 1.
"""

from __future__ import annotations

import argparse
import collections
import sys
import time
import traceback
from functools import partial

from tests.pd import driver, groups

TURNS = 40
GROUPS_AN_EPISODE = 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--transfers", type=int, default=1_000_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    options = parser.parse_args()
    counts: driver.Counts = collections.Counter()
    failures, seed, started = 0, options.first, time.perf_counter()
    shown = started
    while counts["transfers"] < options.transfers and failures < 10:
        plays = [partial(driver.play, seed, TURNS)]
        plays += [
            partial(groups.play, seed * GROUPS_AN_EPISODE + at) for at in range(GROUPS_AN_EPISODE)
        ]
        for play in plays:
            try:
                counts.update(play())
            except Exception:  # noqa: BLE001 - whatever goes wrong is a finding
                failures += 1
                traceback.print_exc()
        seed += 1
        if time.perf_counter() - shown > 60:
            shown = time.perf_counter()
            sys.stdout.write(f"{counts['transfers']:,} transfers, {shown - started:.0f} s\n")
            sys.stdout.flush()
    seconds = time.perf_counter() - started
    lines = [f"{name:32}{counts[name]:>14,}" for name in sorted(counts)]
    lines.append(
        f"{counts['transfers']:,} transfers, seeds {options.first}..{seed}, {seconds:.0f} s: "
        f"{failures} with a wrong label, an unnamed error or something that was not freed"
    )
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
