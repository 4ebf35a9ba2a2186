"""Which worker of a cluster holds how much of a prompt, from the KV events of the engines.

`KvIndexer` is the index; `subscribe` feeds it over ZMQ and needs the extra ``cluster``. With the
extra ``replicas``, `bridge` passes an engine's events on to many indexes over NATS JetStream, and
`follow` is their end of it. `DynamoIndexer` reads the events of Dynamo's routers instead, with the
extra ``dynamo``.
"""

from kvtrie._core import EventError, KvIndexer, OverlapScores, PromptDigests
from kvtrie.cluster.bridges import Bridge, bridge
from kvtrie.cluster.dynamo import DynamoIndexer, DynamoScores, DynamoWorker
from kvtrie.cluster.replicas import Replica, follow
from kvtrie.cluster.streams import ReplicationError
from kvtrie.cluster.subscription import Subscription, SubscriptionState, subscribe

__all__ = [
    "Bridge",
    "DynamoIndexer",
    "DynamoScores",
    "DynamoWorker",
    "EventError",
    "KvIndexer",
    "OverlapScores",
    "PromptDigests",
    "Replica",
    "ReplicationError",
    "Subscription",
    "SubscriptionState",
    "bridge",
    "follow",
    "subscribe",
]
