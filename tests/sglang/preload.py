"""Imports what a job needs of SGLang, in the process that jobs are forked from."""

from __future__ import annotations

import gc

import sglang.srt.managers.scheduler
import sglang.srt.models.registry  # noqa: F401 - it imports all models

import kvtrie.integrations.sglang._support  # noqa: F401

# Garbage collections in the forks leave it out: each would look at all of it, and copy its pages.
gc.collect()
gc.freeze()
