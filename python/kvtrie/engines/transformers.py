"""The embedded engine: Hugging Face causal LMs with full attention or windows, over a KV pool.

Of vision models, Qwen2-VL and Qwen2.5-VL, with their images.

Under ``kvtrie.EXACT_ONLY`` it gives the logits of the model without a cache, except for rounding. A
step runs one model pass per request, without batching.
"""

from __future__ import annotations

import collections.abc
import operator
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, Unpack, cast

import numpy as np

from kvtrie._core import (
    EXACT_ONLY,
    BlockAllocator,
    LayoutError,
    Namespace,
    OutOfBlocksError,
    RadixIndex,
    ReusePolicy,
    SequenceLedger,
    TokenSequence,
    UnsupportedRopeError,
)

try:
    import torch
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoTokenizer,
    )
except ImportError as error:
    _MISSING = (
        "kvtrie.engines.transformers needs torch and transformers: "
        "pip install 'kvtrie[transformers]'"
    )
    raise ImportError(_MISSING) from error

from kvtrie._nearest import nearest
from kvtrie.engines._coding import KVCoding, generator_coding, kv_name
from kvtrie.engines._images import Image, vision_of
from kvtrie.engines._probe import check_model, checked_rope, context_of, language_config
from kvtrie.engines._products import speed_up
from kvtrie.engines._repair import BY_RECORDS, Repair, RepairCounts, records_of
from kvtrie.engines._request import Completion, Event, Options, Request, Usage
from kvtrie.engines._runner import Runner
from kvtrie.engines._sampling import Sampling
from kvtrie.engines._scheduler import Job, Scheduler
from kvtrie.engines._store import BlockCounts, Store
from kvtrie.engines._text import TextStream
from kvtrie.engines._watch import Planned, Watched, Watcher
from kvtrie.engines._windows import GROUP, Split, Windows
from kvtrie.gates import Decision, Gate
from kvtrie.models.directory import checked_model_dir
from kvtrie.models.fingerprint import model_id, rope_id, template_id
from kvtrie.models.rope import short_regime
from kvtrie.models.vision import TEXT_OF_VISION
from kvtrie.pool.kv_pool import KVPool
from kvtrie.pool.layout import KVLayout
from kvtrie.tags.openings import LastMessage

if TYPE_CHECKING:
    from collections.abc import Sequence
    from os import PathLike

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvtrie.engines._images import PlacedImages
    from kvtrie.engines._request import Prompt, Salt, TokenIds
    from kvtrie.rope import RopeSpec

    EventStream = collections.abc.Generator[Event, None, None]

__all__ = [
    "BlockCounts",
    "Completion",
    "Event",
    "Generator",
    "Image",
    "Options",
    "Planned",
    "RepairCounts",
    "Request",
    "Usage",
    "Watcher",
]

DEFAULT_MAX_NEW_TOKENS: Final = 256
_MAX_SESSION: Final = 256
_NO_WINDOW: Final = "with num_window_blocks a window's KV is not kept where runs move from"
_WITHOUT_RECORDS: Final = ("fronts", "ngrams")


class Generator:
    """Answers prompts with a causal LM, and reuses the KV of every earlier prompt and answer.

    Requests run through ``stream`` (one, event by event), ``generate`` (one, to its end), or
    ``submit`` and ``step`` (several at once over one pool). When the pool is full, new requests
    wait and running ones are preempted, youngest first; they resume with their tokens.

    Only one thread at a time may use a generator. Its requests share KV with each other under the
    same salt, and with no other generator.

    Args:
        model: A causal LM in eval mode, on one device, that keeps its KV through the transformers
            ``Cache`` interface; or a Qwen2-VL or Qwen2.5-VL model, whose requests may have
            ``images``.
        tokenizer: Needed for messages and text; without one, prompts are token ids.
        num_blocks: Blocks of the KV pool.
        block_size: Tokens per block.
        policy: Default of what requests may reuse. None: with a gate, the cheapest of the measured
            policies that it clears for each plan (`Gate.ladder`), at most three plans per request,
            five where records are missing; else ``kvtrie.EXACT_ONLY``.
        gate: What `kvtrie calibrate` measured on this model. Approximate policies that it does not
            clear, and all of them without a gate, become ``kvtrie.EXACT_ONLY``; a plan after a kind
            of edit that it does not clear is made again, exact. ``"unchecked"``: no gate; the
            caller is responsible for the quality.
        salt: Tenant of requests that name none; ``kvtrie.SHARED`` to share on purpose.
        adapter: Content id of the model's LoRA adapter, if any.
        seed: Makes sampling repeatable.
        index_seed: Seeds the hashes of the index; None draws one from the operating system. Answers
            do not depend on it.
        prefill_chunk: Most prompt tokens that one ``step`` computes for one request.
        records: Keep what the policies ``repair="probe"``, ``"question"`` and ``"adaptive"`` need
            of every cached token, at one layer of full attention about two thirds up: ``"model"``
            in the model's element type, ``"fp8"`` in about half of that.
            ``records_bytes_per_token`` is what it takes.
            None: nothing is kept, and such a policy means fronts of runs, if the gate clears them.
        num_window_blocks: Blocks of a second pool, for the layers with a window of a model that
            also has layers of full attention. It keeps the last window alone of each request and
            of what is cached, so that W - 1 tokens and a block per conversation are enough, rounded
            up to blocks; ``num_blocks`` are of full attention then. What is cached is reused
            exactly or not at all: nothing moves, and other requests find it when the request has
            ended. Where a request names its ``session``, the windows of earlier turns that it
            passes are given up; without, the least recently used ones. None: one pool keeps the KV
            of all tokens.
        kv_dtype: Keep K and V as codes: ``fp8_e4m3``, ``fp8_e5m2``, ``int8``,
            ``fp8_per_token_head`` or ``int8_per_token_head``; ``docs/models.md`` says with which
            scales. A gate must have been measured with this type and the same scales. None: in the
            model's element type.

    Raises:
        LayoutError: The model's KV cannot be held, or differs from its config; what it does with
            images is not known; ``records`` are asked for and that layer cannot be probed; or
            ``num_window_blocks`` are given and the model has no window, no layer of full attention,
            windows of several widths, or takes images; or its KV cannot be kept in ``kv_dtype``,
            or not next to ``records`` or ``num_window_blocks``; or scales of fp8 cannot be read.
        UnsupportedRopeError: The policy is approximate and the model's KV cannot be moved.
        GateMismatchError: The gate is for another model, and the policy is approximate or None.
        ValueError: The model is in training mode, an argument is out of range, or the policy is
            approximate and ``num_window_blocks`` are given, or allows more than one hop next to
            ``kv_dtype``.
        MemoryError: The pool does not fit.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        num_blocks: int,
        block_size: int = 16,
        policy: ReusePolicy | None = None,
        gate: Gate | Literal["unchecked"] | None = None,
        salt: Salt = "generator",
        adapter: str | None = None,
        seed: int = 0,
        index_seed: int | None = None,
        prefill_chunk: int = 2048,
        records: Literal["model", "fp8"] | None = None,
        num_window_blocks: int | None = None,
        kv_dtype: str | None = None,
    ) -> None:
        if model.training:
            msg = "Generator: the model is in training mode; call model.eval() first"
            raise ValueError(msg)
        if prefill_chunk < 1:
            msg = f"Generator: prefill_chunk must be at least 1, not {prefill_chunk}"
            raise ValueError(msg)
        self._vision = vision_of(model)
        # Longer prompts than those of the short regime are refused.
        layout = KVLayout.from_config(
            model.config, block_size=block_size, dtype=model.dtype, regime="short"
        )
        check_model(model, layout)
        rope: RopeSpec | None = None
        self._cannot_move: str | None = None
        try:
            rope = checked_rope(model, layout)
        except UnsupportedRopeError as error:
            self._cannot_move = str(error)
        coding: KVCoding | None = None
        if kv_dtype is not None:
            layout, coding = generator_coding(model, layout, kv_dtype, records, num_window_blocks)
        split = None
        if num_window_blocks is not None:
            split = _split(model, layout, num_window_blocks, records)
            layout, rope, self._cannot_move = split.full, None, _NO_WINDOW
        self._model = model
        self._coding = coding
        self._tokenizer = tokenizer
        self._seed = seed
        embeddings: Any = model.get_input_embeddings()
        self._vocab_size = int(embeddings.weight.shape[0])
        self._context_len = context_of(model)
        self._has_regimes = short_regime(model.config) is not None
        self._eos_ids = _eos_ids(model, tokenizer)
        self._namespace = Namespace(
            model=model_id(model),
            kv_dtype=kv_name(layout, coding),
            rope=rope_id(language_config(model)),
            adapter=adapter,
            salt=salt,
        )
        given: object = gate
        if not (given is None or given == "unchecked" or isinstance(given, Gate)):
            msg = f"Generator: gate must be a kvtrie.gates.Gate or 'unchecked', not {gate!r}"
            raise TypeError(msg)
        self._gate = gate
        # The pool first, because it may not fit.
        pool = KVPool(layout, rope, num_blocks=num_blocks, device=model.device)
        runner = Runner(model, pool, coding=coding, is_sparse=None if split is None else False)
        index = RadixIndex(
            num_blocks,
            block_size,
            moved_runs=rope is not None,
            seed=index_seed,
            groups=[] if split is None else [split.group],
            item_positions=rope is not None and rope.item_positions,
        )
        probe, self._records = records_of(model, pool, records)
        self._repair = Repair(index, pool, runner, probe, self._records)
        runner.repair = self._repair
        self._store = Store(
            index=index,
            allocator=BlockAllocator(num_blocks),
            pool=pool,
            ledger=SequenceLedger(block_size),
            repair=self._repair,
            windows=None if split is None else Windows.of(split, index, model.device),
        )
        self._default = self._decide(policy)
        self._default_without_records = self._without_records(policy)
        self._scheduler = Scheduler(self._store, runner, prefill_chunk)
        self._watchers: list[Watcher] = []
        self._num_submitted = 0
        self._last_message: LastMessage | None = None

    @classmethod
    def from_pretrained(
        cls,
        path: str | PathLike[str],
        *,
        num_blocks: int,
        block_size: int = 16,
        policy: ReusePolicy | None = None,
        gate: Gate | Literal["unchecked"] | None = None,
        salt: Salt = "generator",
        device: torch.device | str = "cpu",
        dtype: torch.dtype | str = "auto",
        seed: int = 0,
        prefill_chunk: int = 2048,
        records: Literal["model", "fp8"] | None = None,
        num_window_blocks: int | None = None,
        kv_dtype: str | None = None,
    ) -> Generator:
        """Load a model directory; nothing is downloaded and no code of the directory runs.

        On a processor without instructions for bfloat16 and float16, linear layers of these types
        multiply in float32 and round each product once, as such instructions do. torch's own
        products took six times as long on an AMD EPYC with AVX2.

        Args:
            path: A directory with ``config.json``, weights and tokenizer, as ``save_pretrained``
                writes it.
            num_blocks: Blocks of the KV pool.
            block_size: Tokens per block.
            policy: As for the class.
            gate: As for the class.
            salt: As for the class.
            device: Device of model and pool.
            dtype: Element type of the weights; ``"auto"``: the config's.
            seed: As for the class.
            prefill_chunk: As for the class.
            records: As for the class.
            num_window_blocks: As for the class.
            kv_dtype: As for the class.

        Raises:
            FileNotFoundError: There is no such directory, or no ``config.json`` in it.
            LayoutError: As for the class.
            UnsupportedRopeError: As for the class.
        """
        directory = checked_model_dir(path)
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        is_vision = config.model_type in TEXT_OF_VISION
        loader: Any = AutoModelForImageTextToText if is_vision else AutoModelForCausalLM
        model = loader.from_pretrained(directory, dtype=dtype, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        model = model.to(device).eval()
        speed_up(model)
        return cls(
            model,
            tokenizer,
            num_blocks=num_blocks,
            block_size=block_size,
            policy=policy,
            gate=gate,
            salt=salt,
            seed=seed,
            prefill_chunk=prefill_chunk,
            records=records,
            num_window_blocks=num_window_blocks,
            kv_dtype=kv_dtype,
        )

    @property
    def model(self) -> PreTrainedModel:
        """The model."""
        return self._model

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer, or None."""
        return self._tokenizer

    @property
    def index(self) -> RadixIndex:
        """The index: what is cached."""
        return self._store.index

    @property
    def allocator(self) -> BlockAllocator:
        """The free list."""
        return self._store.allocator

    @property
    def pool(self) -> KVPool:
        """The KV itself; with ``num_window_blocks``, that of layers with full attention."""
        return self._store.pool

    @property
    def window_pool(self) -> KVPool | None:
        """The KV of layers with a window, with ``num_window_blocks``."""
        windows = self._store.windows
        return None if windows is None else windows.pool

    @property
    def repair_counts(self) -> RepairCounts:
        """How tokens of moved runs were chosen so far."""
        return self._repair.counts

    @property
    def records_bytes_per_token(self) -> int:
        """Bytes of records per token of the pool; 0 without records."""
        return 0 if self._records is None else self._records.bytes_per_token

    @property
    def num_saturated(self) -> int:
        """Elements of K and V that passes stored as another number so far, with ``kv_dtype``.

        What is beyond the largest code is stored as that; in ``int8``, NaN and infinity as 0.
        Reading it waits for the passes.
        """
        return 0 if self._coding is None else int(self._coding.saturated)

    @property
    def num_running(self) -> int:
        """Requests that have blocks."""
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for blocks."""
        return len(self._scheduler.waiting)

    @property
    def default_decision(self) -> Decision:
        """What requests may reuse that name no policy, and why."""
        return self._default

    def watch(self, watcher: Watcher) -> None:
        """Tell ``watcher`` of every request from here on; those that exist go on without it."""
        self._watchers.append(watcher)

    def unwatch(self, watcher: Watcher) -> None:
        """Tell ``watcher`` of no further request; it hears of those that it knows to their end.

        Raises:
            ValueError: It does not watch.
        """
        self._watchers.remove(watcher)

    def block_counts(self) -> BlockCounts:
        """The owners of the blocks at this moment."""
        stats = self.index.stats()
        return BlockCounts(
            free=self.allocator.num_free,
            held=self._scheduler.num_held,
            indexed=stats.indexed,
            condemned=stats.condemned,
            waiting=stats.waiting,
            total=self.pool.num_blocks,
        )

    def window_block_counts(self) -> BlockCounts | None:
        """The owners of the blocks of layers with a window, with ``num_window_blocks``."""
        windows = self._store.windows
        if windows is None:
            return None
        stats = self.index.group_stats(GROUP)
        return BlockCounts(
            free=windows.allocator.num_free,
            held=self._scheduler.num_held_windows,
            indexed=stats.indexed,
            condemned=stats.condemned + stats.waiting,
            waiting=stats.waiting,
            total=windows.pool.num_blocks,
        )

    def namespace(self, salt: Salt | None = None) -> Namespace:
        """The namespace of requests under ``salt`` (by default, the generator's own)."""
        own = self._namespace
        if salt is None:
            return own
        return Namespace(
            model=own.model,
            kv_dtype=own.kv_dtype,
            rope=own.rope,
            adapter=own.adapter,
            salt=salt,
        )

    def forget(self) -> None:
        """Drop everything cached; running requests keep their blocks until they end."""
        self.allocator.free(self.index.reset())
        self._store.reclaim()

    def encode(
        self,
        prompt: Prompt,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        images: Sequence[Image] = (),
    ) -> TokenIds:
        """Convert a prompt to token ids, as ``submit`` does.

        Args:
            prompt: Chat messages, text, or token ids (returned unchanged).
            tools: Tool schemas for the chat template.
            chat_template_kwargs: More variables for the chat template.
            images: Images of messages or text, whose tokens are repeated as often as each has them.

        Raises:
            ValueError: Messages or text are given without a tokenizer or chat template, a message
                has neither content nor tool calls, or there are other images than places for them.
            TypeError: An image is not an `Image`.
        """
        messages: list[dict[str, Any]] = []
        if isinstance(prompt, (list, tuple)):
            messages = [dict(message) for message in prompt if isinstance(message, Mapping)]
        if not (messages or isinstance(prompt, str)):
            return cast("TokenIds", prompt)
        if self._tokenizer is None:
            msg = "Generator: messages and text need a tokenizer; without one, pass token ids"
            raise ValueError(msg)
        if isinstance(prompt, str):
            return self._with_images(self._tokenizer(prompt)["input_ids"], images)
        if len(messages) != len(prompt):
            msg = "Generator: a list of messages holds messages alone"
            raise TypeError(msg)
        for number, message in enumerate(messages):
            is_call = message.get("role") == "assistant" and message.get("tool_calls")
            if message.get("content") is None and not is_call:
                msg = (
                    f"Generator: prompt[{number}] is a message without content; it must have text, "
                    "or be an assistant's with tool_calls"
                )
                raise ValueError(msg)
        if self._tokenizer.chat_template is None:
            msg = (
                "Generator: the tokenizer has no chat template, so it cannot take messages: set "
                "tokenizer.chat_template, or pass text or token ids"
            )
            raise ValueError(msg)
        ids: Any = self._tokenizer.apply_chat_template(
            messages,
            tools=[dict(tool) for tool in tools] if tools else None,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **dict(chat_template_kwargs or {}),
        )
        return self._with_images(ids, images)

    def submit(self, prompt: Prompt, **options: Unpack[Options]) -> Request:
        """Queue a request; ``step`` runs it.

        Args:
            prompt: Chat messages, text, or token ids.
            **options: See ``Options``.

        Raises:
            OutOfBlocksError: The pool is too small for this request alone.
            ValueError: The prompt is empty, too long for the model or not of its vocabulary, its
                image tokens are not those of ``images``, an option is out of range, or the policy
                is approximate and the generator has ``num_window_blocks``.
            UnsupportedRopeError: The policy is approximate and the model's KV cannot be moved.
            TypeError: The prompt is of another type, or an option is unknown.
        """
        job = self._job("submit", prompt, options)
        self._scheduler.add(job)
        return job.request

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> EventStream:
        """Run one request and yield an event for every token.

        Arguments are checked at once; the request starts when the first event is requested. Other
        requests continue meanwhile. Closing the stream cancels the request; leaving the loop closes
        it once nothing refers to it. An error that ends the request is raised.

        Args:
            prompt: As for ``submit``, which also lists what is raised.
            **options: See ``Options``.
        """
        return self._stream(self._job("stream", prompt, options))

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """Run one request to its end.

        Args:
            prompt: As for ``submit``, which also lists what is raised.
            **options: See ``Options``.
        """
        job = self._job("generate", prompt, options)
        rows = [event.logits for event in self._stream(job) if event.logits is not None]
        request = job.request
        return Completion(
            tokens=list(request.tokens),
            text=request.text,
            usage=request.usage,
            finish_reason=request.finish_reason or "stop",
            decision=request.decision,
            logits=torch.stack(rows) if rows else None,
        )

    def step(self) -> list[Event]:
        """Give every running request one pass through the model, then admit what fits.

        A request whose pass fails ends with ``finish_reason="error"`` and its blocks are
        freed; the others continue. Returns at most one event per request.
        """
        return self._scheduler.step()

    def cancel(self, request: Request) -> None:
        """End a request now, in any state; its computed KV stays reusable.

        Args:
            request: A request of this generator; no effect if it has ended.
        """
        self._scheduler.cancel(request)

    def _stream(self, job: Job) -> EventStream:
        request = job.request
        job.events = deque()
        self._scheduler.add(job)
        try:
            while request.status != "finished" or job.events:
                if not job.events:
                    self.step()
                while job.events:
                    event = job.events.popleft()
                    if event.finish_reason != "error":
                        yield event
            if request.error is not None:
                raise request.error
        finally:
            self.cancel(request)

    def _job(self, method: str, prompt: Prompt, options: Options) -> Job:
        _check_names(f"Generator.{method}", options)
        seq, images = self._sequence(prompt, options)
        prompt_len = len(seq)
        policy = options.get("policy")
        if policy is None:
            decision, without_records = self._default, self._default_without_records
        else:
            decision, without_records = self._decide(policy), self._without_records(policy)
        max_new_tokens = operator.index(options.get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS))
        if prompt_len == 0:
            msg = "Generator: the prompt is empty"
            raise ValueError(msg)
        if max_new_tokens < 1:
            msg = f"Generator: max_new_tokens must be at least 1, not {max_new_tokens}"
            raise ValueError(msg)
        largest = int(seq[0:prompt_len].max())
        if largest >= self._vocab_size:
            msg = f"Generator: token id {largest} is outside the vocabulary of {self._vocab_size}"
            raise ValueError(msg)
        max_len = prompt_len + max_new_tokens
        if self._context_len is not None:
            if prompt_len > self._context_len:
                why = "the model takes"
                if self._has_regimes:
                    why = (
                        "and under its RoPE (LongRoPE or dynamic NTK) the K of every token differs "
                        "above"
                    )
                msg = (
                    f"Generator: {prompt_len} prompt tokens, {why} {self._context_len}: "
                    "send less of the conversation"
                )
                raise ValueError(msg)
            # The last token is never run through the model.
            max_len = min(max_len, self._context_len + 1)
        self._check_fits(prompt_len, max_len)
        number = self._num_submitted
        seed = options.get("seed")
        rng = torch.Generator()
        rng.manual_seed(_request_seed(self._seed, number) if seed is None else seed)
        eos_ids = frozenset() if options.get("ignore_eos") else self._eos_ids
        request = Request(number=number, prompt_len=prompt_len, decision=decision)
        job = Job(
            request=request,
            seq=seq,
            sampling=Sampling(
                temperature=options.get("temperature", 0.0),
                top_k=options.get("top_k"),
                top_p=options.get("top_p", 1.0),
            ),
            rng=rng,
            text=TextStream(self._tokenizer),
            stop_ids=eos_ids | frozenset(options.get("stop_token_ids", ())),
            max_len=max_len,
            decision=decision,
            without_records=without_records,
            return_logits=options.get("return_logits", False),
            session=options.get("session"),
            moved_end=self._moved_end(seq, decision.policy, options),
            images=images,
            watch=Watched(request, self._watchers),
        )
        self._num_submitted = number + 1
        return job

    def _sequence(
        self, prompt: Prompt, options: Options
    ) -> tuple[TokenSequence, PlacedImages | None]:
        """The tokens of a prompt, with items for its images."""
        images = tuple(options.get("images") or ())
        if images and self._vision is None:
            msg = f"Generator: images= has {len(images)} images, and the model is of text alone"
            raise ValueError(msg)
        ids = self.encode(
            prompt,
            tools=options.get("tools"),
            chat_template_kwargs=options.get("chat_template_kwargs"),
            images=images,
        )
        namespace = self.namespace(options.get("salt"))
        seq = TokenSequence(ids, namespace)
        if self._vision is None:
            return seq, None
        tokens = seq[0 : len(seq)]
        placed = self._vision.place(tokens.astype(np.int64), images)
        if placed is None:
            return seq, None
        return TokenSequence(tokens, namespace, items=placed.items), placed

    def _with_images(self, ids: Sequence[int], images: Sequence[Image]) -> list[int]:
        found = [int(token) for token in ids]
        return found if self._vision is None else self._vision.expanded(found, images)

    def _moved_end(self, seq: TokenSequence, policy: ReusePolicy, options: Options) -> int | None:
        given = options.get("moved_end")
        session: object = options.get("session")
        if not isinstance(session, str | None):
            msg = f"Generator: session is of type {type(session).__name__!r}; it must be a str"
            raise TypeError(msg)
        if session is not None and not 1 <= len(session.encode()) <= _MAX_SESSION:
            msg = f"Generator: session has {len(session.encode())} bytes; it must have 1 to 256"
            raise ValueError(msg)
        if given is not None:
            if not 0 <= operator.index(given) <= len(seq):
                msg = f"Generator: moved_end is {given}; it must be in [0, {len(seq)}], the prompt"
                raise ValueError(msg)
            return operator.index(given)
        if not policy.approximate or self._tokenizer is None:
            return None
        if self._last_message is None:
            self._last_message = LastMessage(self._tokenizer)
        return self._last_message(seq[:])

    def _without_records(self, policy: ReusePolicy | None) -> Decision | None:
        """What a plan may reuse that lacks the records by which its policy has tokens chosen."""
        if policy is None:
            return self._decide(None, _WITHOUT_RECORDS)
        if policy.repair not in BY_RECORDS or not policy.recompute_share:
            return None
        return self._decide(policy.replace(repair="fronts"))

    def _decide(
        self,
        policy: ReusePolicy | None,
        repairs: tuple[str, ...] = (*_WITHOUT_RECORDS, *BY_RECORDS),
    ) -> Decision:
        own, gate = self._namespace, self._gate
        template = template_id(getattr(self._tokenizer, "chat_template", None))
        if policy is None and isinstance(gate, Gate) and self._cannot_move is None:
            return gate.ladder(
                repairs=_WITHOUT_RECORDS if self._records is None else repairs,
                min_run=self.index.min_run,
                model=own.model,
                kv_dtype=own.kv_dtype,
                rope=own.rope,
                template=template,
            )
        if policy is None or not policy.approximate:
            return Decision(
                policy or EXACT_ONLY, is_cleared=True, reason="exact reuse needs no clearance"
            )
        if self._cannot_move is not None:
            msg = f"Generator: the policy is approximate, and {self._cannot_move}"
            # Two arguments that exclude each other; the model's keys may well be rotated.
            raise (ValueError if self._cannot_move is _NO_WINDOW else UnsupportedRopeError)(msg)
        quant = self.pool.layout.quant
        if quant is not None and policy.max_hops > 1:
            msg = (
                f"Generator: the policy has max_hops={policy.max_hops}, and K of {quant} may be "
                "rounded to codes again only once"
            )
            raise ValueError(msg)
        if gate is None:
            reason = "there is no gate: `kvtrie calibrate` measures what the policy costs"
            return Decision(EXACT_ONLY, is_cleared=False, reason=reason)
        if gate == "unchecked":
            return Decision(
                policy, is_cleared=True, reason="the caller is responsible for the quality"
            )
        if policy.min_run is None:
            # A gate compares the shortest run.
            policy = policy.replace(min_run=self.index.min_run)
        return gate.policy(
            policy,
            model=own.model,
            kv_dtype=own.kv_dtype,
            rope=own.rope,
            template=template,
        )

    def _check_fits(self, prompt_len: int, max_len: int) -> None:
        block_size, num_blocks = self.pool.layout.block_size, self.pool.num_blocks
        needed = -(-(max_len - 1) // block_size)
        if needed > num_blocks:
            msg = (
                f"Generator: {prompt_len} prompt tokens and up to {max_len - prompt_len} new ones "
                f"need {needed} blocks of {block_size} tokens, the pool has {num_blocks}: raise "
                "num_blocks or lower max_new_tokens"
            )
            raise OutOfBlocksError(msg)


def _split(
    model: PreTrainedModel, layout: KVLayout, num_window_blocks: int, records: str | None
) -> Split:
    """The layouts of two pools, checked against what the second has."""
    if records is not None:
        msg = f"Generator: records={records!r} are of moved runs; num_window_blocks moves none"
        raise ValueError(msg)
    if model.config.model_type in TEXT_OF_VISION:
        msg = "Generator: num_window_blocks: a model that takes images has one pool"
        raise LayoutError(msg)
    return Split.of(layout, num_window_blocks)


def _check_names(where: str, options: Mapping[str, Any]) -> None:
    """Refuse unknown options: under a misspelt ``salt``, tenants would share KV."""
    known = list(Options.__annotations__)
    for name in options:
        if name not in known:
            near = nearest(name, known)
            hint = f"did you mean {near!r}?" if near else f"known are {', '.join(known)}"
            msg = f"{where}: unknown option {name!r}; {hint}"
            raise TypeError(msg)


def _eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """The generation config's ids, else the tokenizer's."""
    config = getattr(model, "generation_config", None)
    found = getattr(config, "eos_token_id", None)
    if found is None and tokenizer is not None:
        found = tokenizer.eos_token_id
    if found is None:
        return frozenset()
    return frozenset([found] if isinstance(found, int) else found)


def _request_seed(seed: int, number: int) -> int:
    """A seed of its own for each request, the same in every run."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)[0])
