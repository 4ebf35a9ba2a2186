"""What a chat template does to the cache, from Python: a check for a build, or a client's tests.

    python examples/template_lab.py [MODEL_OR_TOKENIZER]

It needs `kvtrie[cli]`: no torch, no weights. `kvtrie lab` prints the same for conversations of a
file, and writes a page (`docs/lab.md`). Here a client's own conversation is measured, and each turn
says where its prompt leaves the cache.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from kvtrie import demo, lab

NOTE = "The mill on the river was built in 1872 and rebuilt after the fire, with a wheel of oak. "


def client() -> lab.Chat:
    """A client that puts the time into its system prompt, and shortens old messages."""
    history: list[dict[str, Any]] = []
    requests = []
    for turn, question in enumerate(("When was the mill built?", "Of what is the wheel?", "Why?")):
        system = {"role": "system", "content": f"It is 10:{10 * turn:02}. Answer from the notes."}
        if history:
            history[0] = {"role": "user", "content": "[notes removed]"}
        history.append({"role": "user", "content": NOTE * 4 + question})
        reply = {"role": "assistant", "content": "The notes say so.", "reasoning_content": NOTE}
        requests.append(lab.ClientRequest((system, *history), reply))
        history.append(reply)
    return lab.Chat("our client", tuple(requests), about="the time first, notes removed")


def main(path: Path) -> None:
    """Measure the client next to the built-in conversations."""
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    ours = client()
    for turn, one in enumerate(lab.measure(lab.Template(tokenizer), ours).turns, start=1):
        print(f"turn {turn}: {one.prompt} tokens, {one.prefix} found, {one.reused} with kvtrie")
        if (why := one.divergence) is not None:
            print(f"  leaves the cache at token {why.position} ({why.reason}, {why.cause}):")
            print(f"    cached {why.cached[:40]!r}")
            print(f"    prompt {why.prompt[:40]!r}")
    report = lab.study(tokenizer, [ours, *lab.BUILT_IN.values()])
    print(f"chat format: {report.format or report.why_unknown}")
    print("conversation    prompt  computed  with kvtrie")
    for row in report.rows:
        switch = ", ".join(f"{name}={value}" for name, value in row.switch.items())
        if (measured := row.measured) is not None and not switch:
            tokens = (measured.prompt, measured.computed_by_prefix, measured.computed)
            print(f"{row.chat:14}  {tokens[0]:6}  {tokens[1]:8}  {tokens[2]:11}")
    for saving in report.savings:
        computed = f"{saving.before} tokens computed become {saving.after}"
        print(f"{saving.chat}, {saving.change}: {computed}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="What a chat template does to the cache.")
    parser.add_argument("path", nargs="?", help="model or tokenizer (default: the small model)")
    try:
        path = Path(parser.parse_args().path or demo.model_path())
    except FileNotFoundError as error:
        parser.error(str(error))
    if not (path / "tokenizer.json").is_file():
        parser.error(f"{path} is not the directory of a tokenizer: it has no tokenizer.json")
    main(path)
