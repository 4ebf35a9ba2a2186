"""What the README says about installing holds."""

from __future__ import annotations

import subprocess
import sys

import pytest

WITHOUT_EXTRAS = """
import sys

EXTRAS = {"torch", "transformers", "tokenizers", "safetensors", "jinja2", "hypothesis"}

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in EXTRAS:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuse())
import kvtrie, kvtrie.tags, kvtrie.testing.model

for name in kvtrie.__all__:
    if name in ("KVPool",):
        continue
    getattr(kvtrie, name)
"""


def test_package_needs_numpy_alone() -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", WITHOUT_EXTRAS], check=True)


def test_what_needs_torch_says_which_extra_has_it() -> None:
    code = """
import sys
sys.modules["torch"] = None
import kvtrie
try:
    kvtrie.KVPool
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "kvtrie.KVPool needs torch: pip install 'kvtrie[torch]'\n"


def test_import_leaves_torch_alone() -> None:
    code = "import sys, kvtrie.tags; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


@pytest.mark.parametrize(
    ("hidden", "code", "message"),
    [
        ("torch", "kvtrie.KVPool", "kvtrie.KVPool needs torch: pip install 'kvtrie[torch]'"),
        ("torch", "from kvtrie import KVPool", "kvtrie.KVPool needs torch: pip install"),
        ("torch", "from kvtrie.pool import KVPool", "kvtrie.KVPool needs torch: pip install"),
        ("torch", "import kvtrie.kernels.reference", "kvtrie.kernels needs torch: pip install"),
        (
            "torch",
            "from kvtrie.store import SpanLoader",
            "SpanLoader and rows_of of kvtrie.store need torch: pip install 'kvtrie[store,torch]'",
        ),
        (
            "torch",
            "from kvtrie.store import rows_of",
            "SpanLoader and rows_of of kvtrie.store need",
        ),
        ("jinja2", "from kvtrie import lab", "kvtrie.lab needs jinja2: pip install 'kvtrie[cli]'"),
        ("jinja2", "import kvtrie.fleet", "kvtrie.fleet needs jinja2: pip install 'kvtrie[proxy]'"),
        ("numpy", "kvtrie.KVPool", "kvtrie.KVPool needs numpy: pip install numpy"),
        ("numpy", "kvtrie.RopeSpec", "kvtrie.RopeSpec needs numpy: pip install numpy"),
        ("numpy", "kvtrie.TurnTracker", "kvtrie.TurnTracker needs numpy: pip install numpy"),
    ],
)
def test_a_name_says_what_it_needs(hidden: str, code: str, message: str) -> None:
    hide = f"import sys; sys.modules[{hidden!r}] = None; import kvtrie; kvtrie.KVLayout\n"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", hide + code],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"ImportError: {message}")
