"""Tests the wheel that `make dist` built, as a user gets it.

    python tools/test_wheel.py --dist FOLDER --work FOLDER [--index] VERSION...

For each version of Python that is found there is a new environment. With the extra `cli` alone,
`kvtrie lab`, `replay`, `inspect` and `explain` run, and there is no torch. In another one, with
numpy alone, kvtrie is imported with warnings as errors; with the tests' own packages, the index is
tested; with the extras `cli` and `transformers`, and the small models, the engine and the
commands. ``--index`` stops before that. Every package has the hash that constraints/dev.txt names.
No test imports the package from this checkout.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UV = Path(sys.executable).parent / "uv"

INDEX = (
    *("property", "record", "regressions", "replay", "router", "threads", "ledger", "transfer"),
    "unit",
)
ENGINE = ("engines", "kernels", "calibrate", "cli")

IMPORT = """
import sys
from pathlib import Path
import kvtrie, kvtrie.demo, kvtrie.testing.model
assert Path(kvtrie.__file__).is_relative_to(sys.prefix), kvtrie.__file__
space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
index = kvtrie.RadixIndex(num_blocks=4, block_size=2)
seq = kvtrie.TokenSequence([1, 2, 3, 4], space)
index.insert(seq, [3, 0], num_computed=4, source=kvtrie.COMPUTED)
assert index.lookup(seq).blocks.tolist() == [3, 0]
assert kvtrie.demo.conversation_path().is_file()
for call, sentence in (
    (lambda: kvtrie.KVPool, "pip install 'kvtrie[torch]'"),
    (kvtrie.demo.model_path, "pip install dist/kvtrie_demo_models-*.whl"),
):
    try:
        call()
    except (ImportError, FileNotFoundError) as error:
        assert sentence in str(error), error
    else:
        raise AssertionError(sentence)
"""

# What the extra `cli` brings: each command on a small input, in a folder of its own.
COMMANDS = """
import importlib.util, json, re, subprocess, sys
from pathlib import Path

def run(*args, code=0):
    command = [str(Path(sys.executable).parent / "kvtrie"), *args]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != code:
        raise SystemExit(f"{args}: exit code {done.returncode}, not {code}: {done.stderr}")
    return done.stdout + done.stderr

def check(found, *wanted):
    for one in wanted:
        if not re.search(one, found):
            raise SystemExit(f"{one!r} is not in {found!r}")

if importlib.util.find_spec("torch") is not None:
    raise SystemExit("the extra cli brings torch")
import kvtrie
check(kvtrie.__file__, "^" + re.escape(sys.prefix))
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

Path("model").mkdir()
alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
core = Tokenizer(models.BPE(vocab={one: at for at, one in enumerate(alphabet)}, merges=[]))
core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
core.decoder = decoders.ByteLevel()
core.save("model/tokenizer.json")
template = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
Path("model/tokenizer_config.json").write_text(json.dumps(config))
shown = run("lab", "model", "--html", "lab.html")
check(shown, "date +default", "Turn by turn", "the text changed")

rows = [{"input_length": 130, "hash_ids": [1, 2, at]} for at in range(3, 6)]
Path("trace.jsonl").write_text("".join(json.dumps(row) + chr(10) for row in rows))
shown = run("replay", "trace.jsonl", "--html", "replay.html", "--svg", "replay.svg")
check(shown, "3 requests, 390 prompt tokens", "offline optimum", "65.6 %")
texts = [{"timestamp": at, "input": "as before, " * 9 + str(at), "output": "", "session_id": ""}
         for at in range(3)]
Path("texts.jsonl").write_text("".join(json.dumps(row) + chr(10) for row in texts))
check(run("replay", "texts.jsonl", "--tokenizer", "model"), "3 requests, 300 prompt tokens")

Path("a.json").write_text(json.dumps(list(range(64))))
Path("b.json").write_text(json.dumps([*range(40), *range(90, 114)]))
check(run("explain", "a.json", "b.json"), "diverged")
check(run("inspect", "a.json", "b.json"), "inspect.html")
for name in ("lab.html", "replay.html", "inspect.html"):
    check(Path(name).read_text(encoding="utf-8"), "(?s)^<!doctype html>.*</html>")
check(Path("replay.svg").read_text(encoding="utf-8"), "^<svg ")
# What needs torch says so.
Path("model/config.json").write_text("{}")
check(run("calibrate", "model", code=2), "calibrate needs torch")
"""


def interpreter(version: str) -> str | None:
    """A Python of this version on this machine."""
    done = subprocess.run(  # noqa: S603 - a command of our own
        [str(UV), "python", "find", "--system", "--no-python-downloads", version],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return done.stdout.strip()
    # pyenv shows one version at a time; the others are in its folder.
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = sorted(root.glob(f"versions/{version}.*/bin/python"))
    return str(found[-1]) if found else None


def run(*command: object, cwd: Path = ROOT) -> None:
    """Runs a command; ends this one if it fails."""
    done = subprocess.run(list(map(str, command)), cwd=cwd, check=False)  # noqa: S603
    if done.returncode:
        msg = f"kvtrie: {' '.join(map(str, command[:4]))} failed"
        raise SystemExit(msg)


def installs(env: Path, dist: Path) -> tuple[list[object], list[object]]:
    """Commands that install what the wheel needs, and what is in the folder."""
    install: list[object] = [UV, "pip", "install", "--quiet", "--python", env / "bin" / "python"]
    pinned = [*install, "--require-hashes", "--no-build", "--requirements", "pyproject.toml"]
    pinned += ["--constraints", "constraints/dev.txt"]
    # Nothing is fetched: what the wheel needs is there, and uv takes the file for this machine. Its
    # cache knows files by name and version: it would give an earlier build.
    return pinned, [*install, "--no-index", "--no-cache", "--find-links", dist]


def test_commands(python: str, dist: Path, env: Path) -> None:
    """Tests the commands of the extra `cli` in an environment that has nothing else."""
    pinned, ours = installs(env, dist)
    run(UV, "venv", "--quiet", "--clear", "--python", python, env)
    run(*pinned, "--extra", "cli")
    run(*ours, "kvtrie[cli]")
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "commands.py"
        program.write_text(COMMANDS, encoding="utf-8")
        run(env / "bin" / "python", program, cwd=Path(folder))


def test(python: str, dist: Path, env: Path, *, index_only: bool) -> None:
    """Tests the wheel with one Python."""
    pinned, ours = installs(env, dist)
    run(UV, "venv", "--quiet", "--clear", "--python", python, env)
    run(*pinned)
    run(*ours, "kvtrie")
    with tempfile.TemporaryDirectory() as folder:
        run(env / "bin" / "python", "-W", "error", "-c", IMPORT, cwd=Path(folder))
    run(*pinned, "--extra", "test")
    tests(env, *INDEX)
    if index_only:
        return
    run(*pinned, "--extra", "test", "--extra", "cli", "--extra", "transformers")
    run(*ours, "kvtrie-demo-models")
    tests(env, *ENGINE)


def tests(env: Path, *folders: str) -> None:
    """Runs folders of the suite; the package is in none of them."""
    command = [env / "bin" / "python", "-m", "pytest", "--quiet", "-p", "no:cacheprovider"]
    run(*command, *(f"tests/{folder}" for folder in folders))


def main() -> int:
    """Tests with every version that is found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dist", required=True, type=Path)
    parser.add_argument("--work", required=True, type=Path)
    parser.add_argument("--index", action="store_true", help="leave out what needs torch")
    parser.add_argument("versions", nargs="+")
    options = parser.parse_args()
    tested = []
    for version in options.versions:
        python = interpreter(version)
        if python is None:
            print(f"test-wheel: Python {version}: not found, not tested", flush=True)
            continue
        print(f"test-wheel: Python {version}: {python}", flush=True)
        env = options.work.absolute() / version
        test_commands(python, options.dist.absolute(), env)
        test(python, options.dist.absolute(), env, index_only=options.index)
        shutil.rmtree(env)
        tested.append(version)
    print(f"test-wheel: passed with Python {', '.join(tested) or 'none'}")
    return 0 if tested else 1


if __name__ == "__main__":
    sys.exit(main())
