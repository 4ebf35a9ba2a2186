# %% [markdown]
# # What dropped reasoning costs, and what kvtrie finds
#
# Chat templates of reasoning models drop the reasoning of earlier replies. The next prompt then
# differs from what is cached at the first dropped token, and a prefix cache ends there,
# although most of what follows is cached: at another position. This notebook measures it turn
# by turn. It takes a tokenizer with its chat template, and no weights; replace `PATH` by a
# model directory of yours.
#
# `jupytext --to notebook examples/edited_history.py` makes a notebook of it; it also runs as a
# script.

# %%
import matplotlib.pyplot as plt
import numpy as np
from transformers import AutoTokenizer

import kvtrie
from kvtrie import demo, lab

PATH = demo.model_path()
tokenizer = AutoTokenizer.from_pretrained(PATH, local_files_only=True)

# %% [markdown]
# The conversation: questions and answers, with reasoning in each reply. The client only
# appends. The same requests are rendered twice, with a template that keeps reasoning and with
# one that drops it; this tokenizer's template has a switch for that.

# %%
chat = lab.BUILT_IN["reasoning"]
templates = {
    "keeps reasoning": lab.Template(tokenizer, {"preserve_thinking": True}),
    "drops reasoning": lab.Template(tokenizer, {"preserve_thinking": False}),
}
replayed = {name: lab.measure(template, chat) for name, template in templates.items()}

print("template         turn  prompt  prefix cache  kvtrie")
for name, found in replayed.items():
    for turn, one in enumerate(found.turns, start=1):
        print(f"{name}  {turn:4}  {one.prompt:6}  {one.prefix:12}  {one.reused:6}")

# %% [markdown]
# Prompts are shorter without reasoning, but less of each is found by a prefix cache. Where it
# ends, and why:

# %%
dropped = replayed["drops reasoning"]
for turn, one in enumerate(dropped.turns, start=1):
    if (why := one.divergence) is not None:
        print(f"turn {turn}, token {why.position}: {why.cause}")
        print(f"  cached {why.cached[:50]!r}")
        print(f"  prompt {why.prompt[:50]!r}")

# %% [markdown]
# The picture has a bar for each turn of the template that drops reasoning: tokens in place
# (exact), tokens that move (approximate: right tokens at right positions, computed after
# reasoning that is gone), and tokens to compute. The line marks where a prefix cache ends.

# %%
COLOURS = {"exact": "#0072B2", "moved": "#E69F00", "computed": "#FFFFFF"}
HATCHES = {"exact": "", "moved": "//", "computed": ""}
figure, axes = plt.subplots(figsize=(8, 2.6), layout="constrained")
for turn, one in enumerate(dropped.turns, start=1):
    for start, end, what in one.segments:
        axes.barh(
            turn,
            end - start,
            left=start,
            color=COLOURS[what],
            hatch=HATCHES[what],
            edgecolor="black",
            linewidth=0.5,
            label=what if turn == 3 else None,
        )
    axes.plot([one.prefix, one.prefix], [turn - 0.45, turn + 0.45], color="black", linewidth=3)
axes.set(xlabel="prompt token", ylabel="turn", yticks=range(1, len(dropped.turns) + 1))
axes.invert_yaxis()
labels = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
axes.legend(labels.values(), labels.keys(), loc="lower right")

# %% [markdown]
# The same by hand, for the second turn: cache the first prompt with its reply, then plan the
# next prompt. Segments with a `delta` move by so many positions. Under `kvtrie.EXACT_ONLY`, the
# default, nothing moves; which edits a model takes well is measured, by `kvtrie calibrate`.

# %%
first, second = (templates["drops reasoning"].render(chat, one) for one in chat.requests[:2])
space = kvtrie.Namespace(model="tokenizer-only", salt=kvtrie.SHARED)
index = kvtrie.RadixIndex(num_blocks=256, block_size=16)
cached = kvtrie.TokenSequence([*first.ids, *first.sampled[:-1]], space)
blocks = np.arange(-(-len(cached) // 16))
index.insert(cached, blocks, num_computed=len(cached), source=kvtrie.COMPUTED, session="chat")

prompt = kvtrie.TokenSequence(second.ids, space)
for name, policy in (("exact only", kvtrie.EXACT_ONLY), ("moved runs", kvtrie.ReusePolicy())):
    with index.plan(prompt, policy, session="chat") as plan:
        print(f"{name}: {plan.num_exact} exact, {plan.num_approximate} moved, {plan.num_compute}")
        print([(int(one["start"]), int(one["end"]), int(one["delta"])) for one in plan.segments])

# %%
saved = dropped.computed_by_prefix - dropped.computed
print(
    f"{dropped.computed_by_prefix} tokens computed with a prefix cache, {saved} fewer with kvtrie"
)
