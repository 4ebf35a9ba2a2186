"""Builds what a release consists of, and inspects it.

    python tools/dist.py --tools FOLDER --build FOLDER --out FOLDER

``--tools`` has ziglang, auditwheel and twine, of which zig links against an old glibc. The source
distribution is made first. Wheels are built from it, unpacked elsewhere, so a file that it lacks
stops the build. The package of the small models follows.

A wheel needs the standard library of its target: that of ``rustc``, or of the toolchain that `make
rust-aarch64` has unpacked. Where neither has it, a line says that the wheel is left out.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
GLIBC = (2, 28)
TARGETS = ("x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu")
SPARE = ROOT / "target" / "tools" / "debian-rust" / "rustc"


def run(*command: str | Path, cwd: Path = ROOT, **variables: str) -> str:
    """The output of a command.

    Raises:
        SystemExit: It failed; what it said is on stderr.
    """
    done = subprocess.run(  # noqa: S603 - commands of our own
        list(map(str, command)),
        cwd=cwd,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.stderr.write(done.stdout + done.stderr)
        msg = f"kvtrie: {' '.join(map(str, command[:3]))} failed"
        raise SystemExit(msg)
    return done.stdout


def compiler(target: str) -> str | None:
    """A rustc with the standard library of a target."""
    for rustc in (os.environ.get("RUSTC", "rustc"), str(SPARE)):
        if shutil.which(rustc) is None:
            continue
        folder = Path(run(rustc, "--print", "target-libdir", "--target", target).strip())
        if any(folder.glob("libstd-*.rlib")):
            return rustc
    return None


def source(build: Path, out: Path) -> Path:
    """Makes the source distribution, and the folder that it unpacks to."""
    run(BIN / "maturin", "sdist", "--out", out)
    (archive,) = out.glob("kvtrie-*.tar.gz")
    folder = build / "source"
    shutil.rmtree(folder, ignore_errors=True)
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    (unpacked,) = folder.iterdir()
    # Cargo compares times, and those in an archive never change.
    for path in unpacked.rglob("*"):
        os.utime(path)
    return unpacked


def wheel(unpacked: Path, target: str, rustc: str, *, tools: Path, build: Path, out: Path) -> None:
    """Builds the wheel of one target."""
    glibc = "_".join(map(str, GLIBC))
    # Not locked: the lock file names the benchmarks too, which are not in the archive.
    options = ["--release", "--strip", "--quiet", "--zig", "--target", target]
    options += ["--compatibility", f"manylinux_{glibc}", "--target-dir", str(build / target)]
    # maturin asks the first Python of the path for zig.
    path = f"{tools.resolve()}{os.pathsep}{os.environ['PATH']}"
    run(BIN / "maturin", "build", *options, "--out", out, cwd=unpacked, PATH=path, RUSTC=rustc)


def inspect(path: Path, tools: Path) -> str:
    """What auditwheel finds that a wheel of ours needs.

    Raises:
        SystemExit: A newer glibc than the file's name says, or a library besides.
    """
    needed: str = json.loads(run(tools / "auditwheel", "show", "--json", path))["overall_tag"]
    glibc = re.match(r"manylinux_(\d+)_(\d+)_", needed)
    if glibc is None or (int(glibc[1]), int(glibc[2])) > GLIBC:
        msg = f"kvtrie: {path.name} needs {needed}"
        raise SystemExit(msg)
    return needed


def main() -> int:
    """Builds and inspects everything."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name in ("--tools", "--build", "--out"):
        parser.add_argument(name, required=True, type=Path)
    options = parser.parse_args()
    tools, build = options.tools.absolute(), options.build.absolute()
    out = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    for old in (*out.glob("*.whl"), *out.glob("*.tar.gz")):
        old.unlink()
    unpacked = source(build, out)
    for target in TARGETS:
        rustc = compiler(target)
        if rustc is None:
            print(f"dist: no wheel for {target}: rustc has no standard library for it")
            continue
        wheel(unpacked, target, rustc, tools=tools, build=build, out=out)
    run(sys.executable, "-m", "flit_core.wheel", "--outdir", out, ROOT / "demo-models")
    files = sorted(path for path in out.iterdir() if path.suffix in (".gz", ".whl"))
    run(tools / "twine", "check", "--strict", *files)
    for path in files:
        needs = f", needs {inspect(path, tools)}" if "manylinux" in path.name else ""
        print(f"dist: {path.name}: {path.stat().st_size / 1e6:.2f} MB{needs}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
