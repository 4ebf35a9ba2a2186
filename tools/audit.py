"""Checks the crates and packages that kvtrie uses and is developed with.

    python tools/audit.py --deny CARGO_DENY --tools FOLDER

``FOLDER`` has pip-audit and pip-licenses. Licences, sources and bans are always checked. Where a
list of known vulnerabilities cannot be reached, a line says "not checked", and nothing fails. The
peers' environments are not audited: nothing of them is shipped.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MANIFESTS = ("Cargo.toml", "fuzz/Cargo.toml", "locks/Cargo.toml")
LISTS = tuple(
    f"constraints/{name}.txt" for name in ("bootstrap", "dev", "audit", "dist", "workflows")
)

# Seconds. A database is fetched, and a service asked about a hundred packages one by one.
LIMIT = 120
# Every complete list of vulnerabilities has some of this release; one that has none is not used.
CANARY = "jinja2==3.1.2"

# As packages write them. Each lets anyone use, change and distribute the package; under MPL,
# changes of its own files must be published.
LICENSES = frozenset(
    {
        *("0BSD", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "BSD-2-Clause", "BSD-3-Clause"),
        *("BSL-1.0", "CC0-1.0", "CNRI-Python", "ISC"),
        *("MIT", "MIT-0", "MIT-CMU", "MPL-2.0", "PSF-2.0"),
        "Zlib",
        *("Apache 2.0", "Apache 2.0 License", "Apache Software License", "BSD", "BSD License"),
        *("3-Clause BSD License", "DFSG approved"),
        *("ISC License (ISCL)", "MIT License", "Mozilla Public License 2.0 (MPL 2.0)"),
        "Python Software Foundation License",
    }
)
# torch's CUDA libraries, under NVIDIA's own terms: a GPU needs them, and kvtrie ships none.
OTHER_TERMS = ("cuda-", "nvidia-")
# A command of `make lint`, only under these terms: kvtrie neither imports it nor ships it.
COMMANDS = {"codespell": "GPL-2.0-only"}


def say(text: str) -> None:
    print(f"audit: {text}", flush=True)


def run(*command: str) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(  # noqa: S603 - commands of our own
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None


def deny(binary: str, *checks: str, offline: bool = False) -> bool:
    good = True
    for manifest in MANIFESTS:
        options = ["--manifest-path", manifest, "--all-features", "--locked"]
        if offline:
            options.append("--offline")
        done = run(binary, *options, "check", *checks)
        if done is None or done.returncode:
            say(f"crates of {manifest}: cargo deny check {' '.join(checks)} failed")
            print("it took too long" if done is None else done.stderr)
            good = False
    return good


def crates(binary: str) -> bool:
    good = deny(binary, "licenses", "bans", "sources")
    if good:
        say("crates: licences, bans and sources: checked")
    fetched = run(binary, "fetch", "db")
    if fetched is None or fetched.returncode:
        say("crates: advisories: not checked (the database could not be fetched)")
        return good
    known = deny(binary, "advisories", offline=True)
    if known:
        say("crates: advisories: checked")
    return good and known


def is_allowed(license_: str) -> bool:
    """Whether a package's terms are among those above; of alternatives one is enough.

    >>> is_allowed("MIT OR GPL-3.0-only"), is_allowed("MIT AND GPL-3.0-only"), is_allowed("UNKNOWN")
    (True, False, False)
    """
    alternatives = (one.replace("; ", " AND ").split(" AND ") for one in license_.split(" OR "))
    return any(all(part in LICENSES for part in parts) for parts in alternatives)


def licenses(tools: Path) -> bool:
    command = ["--python", sys.executable, "--format", "json"]
    done = run(str(tools / "pip-licenses"), *command)
    if done is None or done.returncode:
        say(f"packages: pip-licenses failed: {done.stderr if done else 'it took too long'}")
        return False
    found: list[dict[str, str]] = json.loads(done.stdout)
    refused = [
        one
        for one in found
        if not one["Name"].startswith(OTHER_TERMS)
        and one["License"] != COMMANDS.get(one["Name"])
        and not is_allowed(one["License"])
    ]
    for one in refused:
        name, terms = f"{one['Name']} {one['Version']}", one["License"]
        say(f"packages: {name}: the licence {terms!r} is not allowed")
    if not refused:
        say(f"packages: licences of {len(found)}: checked")
    return not refused


def ask(tools: Path, *lists: str) -> list[dict[str, Any]] | str:
    """What is known of the packages of lists, or why nothing is."""
    command = ["--no-deps", "--disable-pip", "--progress-spinner", "off", "--format", "json"]
    requirements = [word for path in lists for word in ("--requirement", path)]
    done = run(str(tools / "pip-audit"), *command, *requirements)
    if done is None:
        return f"the service took more than {LIMIT} s"
    try:
        found: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError, TypeError):
        last = done.stderr.strip().splitlines()
        return last[-1] if last else "pip-audit says nothing"
    return found


def vulnerabilities(tools: Path) -> bool:
    what = "packages: known vulnerabilities"
    with tempfile.TemporaryDirectory() as folder:
        canary = Path(folder) / "canary.txt"
        canary.write_text(CANARY, encoding="utf-8")
        known = ask(tools, str(canary))
    if isinstance(known, str):
        say(f"{what}: not checked ({known})")
        return True
    if not any(one.get("vulns") for one in known):
        say(f"{what}: not checked (the service knows none of {CANARY}, which has some)")
        return True
    found = ask(tools, *LISTS)
    if isinstance(found, str):
        say(f"{what}: not checked ({found})")
        return True
    good = True
    for one in found:
        for vulnerability in one.get("vulns", ()):
            fixed = ", ".join(vulnerability["fix_versions"]) or "no version"
            say(f"{what}: {one['name']} {one['version']}: {vulnerability['id']}, fixed in {fixed}")
            good = False
    skipped = sorted({one["name"] for one in found if "skip_reason" in one})
    if skipped:
        say(f"{what}: not checked for {', '.join(skipped)}")
    say(f"{what}: checked for {len(found) - len(skipped)} packages")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--deny", required=True, help="cargo-deny")
    parser.add_argument("--tools", required=True, type=Path, help="folder of pip-audit")
    options = parser.parse_args()
    tools = options.tools
    good = [crates(options.deny), licenses(tools), vulnerabilities(tools)]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
