"""Which worker of a cluster holds how much of a prompt, from the KV events of the engines.

`KvIndexer` is the index; `subscribe` feeds it over ZMQ and needs the extra ``cluster``.
"""

from kvtrie._core import EventError, KvIndexer, OverlapScores, PromptDigests
from kvtrie.cluster.subscription import Subscription, SubscriptionState, subscribe

__all__ = [
    "EventError",
    "KvIndexer",
    "OverlapScores",
    "PromptDigests",
    "Subscription",
    "SubscriptionState",
    "subscribe",
]
