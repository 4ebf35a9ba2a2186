"""OpenTelemetry spans of a generator's requests.

`Tracing` adds one span ``kvtrie.request`` for each request, from its submission to its end, in the
caller's current span. In it are ``kvtrie.plan``, ``kvtrie.copy``, ``kvtrie.compute`` (one for each
pass over prompt tokens) and ``kvtrie.insert`` (up to the first token, and at the end). The passes
of single generated tokens have no spans.

Attributes are numbers of tokens, reasons and names of errors; no text, token id, session or salt.
This needs the API of OpenTelemetry alone. Without a provider that records, nothing is computed.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

try:
    from opentelemetry import trace
    from opentelemetry.trace import StatusCode
except ImportError as error:
    _MISSING = "kvtrie.metrics.tracing needs opentelemetry-api: pip install 'kvtrie[tracing]'"
    raise ImportError(_MISSING) from error

from kvtrie._core import __version__
from kvtrie.engines._watch import Watcher
from kvtrie.metrics.generator import PromptReader
from kvtrie.metrics.reasons import NAMES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from opentelemetry.trace import Span, TracerProvider

    from kvtrie._core import ReusePlan
    from kvtrie.engines._watch import Phase, Planned
    from kvtrie.engines.transformers import Generator, Request
    from kvtrie.metrics.generator import Looked

_TOKENS: Final = {
    "plan": "kvtrie.tokens.prompt",
    "copy": "kvtrie.tokens.copied",
    "compute": "kvtrie.tokens.computed",
    "insert": "kvtrie.tokens.offered",
}


@dataclass(slots=True, eq=False)
class _Traced:
    span: Span
    looked: Looked | None = None
    is_decoding: bool = False


class Tracing(Watcher):
    """Makes spans of a generator's requests, from its next one on.

    ``generator.unwatch(tracing)`` ends it.

    Args:
        generator: The generator.
        tracer_provider: Where spans go; None: the provider that OpenTelemetry has by then.

    Example:
        >>> from kvtrie.metrics.tracing import Tracing
        >>> tracing = Tracing(generator)  # doctest: +SKIP
    """

    def __init__(self, generator: Generator, tracer_provider: TracerProvider | None = None) -> None:
        self._tracer = trace.get_tracer("kvtrie", __version__, tracer_provider)
        self._reader = PromptReader(generator)
        self._traced: dict[int, _Traced] = {}
        generator.watch(self)

    def submitted(self, request: Request) -> None:
        """Start its span."""
        span = self._tracer.start_span("kvtrie.request")
        if span.is_recording():
            span.set_attribute("kvtrie.tokens.prompt", request.prompt_len)
            self._traced[request.number] = _Traced(span)

    def phase(
        self, request: Request, name: Phase, num_tokens: int
    ) -> AbstractContextManager[object]:
        """A span for it, unless it is one of many while tokens are generated."""
        traced = self._traced.get(request.number)
        if traced is None:
            return contextlib.nullcontext()
        traced.is_decoding |= name == "decode"
        if traced.is_decoding and request.status == "running" and name in ("decode", "insert"):
            return contextlib.nullcontext()
        return self._spanned(traced.span, name, num_tokens)

    def planned(self, request: Request, planned: Planned) -> None:
        """Say why its tokens would be computed."""
        traced = self._traced.get(request.number)
        if traced is not None and request.usage.prompt == 0:
            traced.looked = self._reader.look(request, planned, traced.looked)

    def admitted(self, request: Request, plan: ReusePlan) -> None:
        """Say what it reuses."""
        traced = self._traced.get(request.number)
        if traced is None or traced.looked is None:
            return
        span, looked, usage = traced.span, traced.looked, request.usage
        traced.looked = None
        span.set_attributes(
            {
                "kvtrie.tokens.exact": usage.exact,
                "kvtrie.tokens.approximate": usage.moved,
                "kvtrie.tokens.computed": usage.computed,
                "kvtrie.policy.approximate": looked.policy.approximate,
            }
        )
        gaps = plan.gaps
        if len(gaps):
            span.set_attribute("kvtrie.miss.position", int(gaps[0][0]))
            span.set_attribute("kvtrie.miss.reason", NAMES[looked.labels[gaps[0][0]]])
        for reason, count in self._reader.prompts.add(looked.seq, plan, looked.labels).items():
            span.set_attribute(f"kvtrie.miss.{reason}", count)

    def emitted(self, request: Request) -> None:
        """Mark the first token."""
        traced = self._traced.get(request.number)
        if traced is not None and len(request.tokens) == 1:
            traced.span.add_event("kvtrie.first_token")

    def preempted(self, request: Request) -> None:
        """Mark it."""
        traced = self._traced.get(request.number)
        if traced is not None:
            traced.is_decoding = False
            traced.span.add_event("kvtrie.preempted")

    def ended(self, request: Request) -> None:
        """End its span."""
        traced = self._traced.pop(request.number, None)
        if traced is None:
            return
        span = traced.span
        span.set_attribute("kvtrie.tokens.generated", len(request.tokens))
        span.set_attribute("kvtrie.finish_reason", str(request.finish_reason))
        if request.error is not None:
            # Its text may name what was in the prompt.
            span.set_attribute("error.type", type(request.error).__name__)
            span.set_status(StatusCode.ERROR)
        span.end()

    @contextlib.contextmanager
    def _spanned(self, parent: Span, name: Phase, num_tokens: int) -> Iterator[None]:
        span = self._tracer.start_span(
            f"kvtrie.{name}",
            trace.set_span_in_context(parent),
            attributes={_TOKENS.get(name, "kvtrie.tokens"): num_tokens},
        )
        try:
            yield
        except BaseException as error:
            span.set_attribute("error.type", type(error).__name__)
            span.set_status(StatusCode.ERROR)
            raise
        finally:
            span.end()
