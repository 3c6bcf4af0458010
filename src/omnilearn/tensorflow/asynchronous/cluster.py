"""Who is here in asynchronous mode: a chief that runs the script, workers and parameter servers that serve it."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import tensorflow as tf

from omnilearn.errors import UsageError
from omnilearn.tensorflow.world import config


def join() -> bool:
    """Serve, where TF_CONFIG makes this process a worker or a parameter server: then it does not come back.

    Returns whether there is a cluster: False means that this process trains alone.
    """
    found = config()
    if not found:
        return False
    cluster, kind = found["cluster"], found["task"].get("type")
    if not cluster.get("ps") or not cluster.get("worker") or not cluster.get("chief"):
        raise UsageError(
            f"mode='async' needs a chief, workers and parameter servers, TF_CONFIG has {', '.join(cluster)}: start it "
            f"with omnilearn run --framework tensorflow --nproc 3 --ps 1"
        )
    if kind in ("worker", "ps"):
        _serve(cluster, kind, found["task"]["index"])
    if kind != "chief":
        raise UsageError(f"TF_CONFIG makes this process a {kind!r}: mode='async' has a chief, workers and ps")
    return True


def _serve(cluster: Any, kind: str, index: int) -> NoReturn:
    server = tf.distribute.Server(tf.train.ClusterSpec(cluster), kind, index, protocol="grpc", start=True)
    server.join()  # until the launcher ends this process
    sys.exit(0)


class Cluster:
    """The chief's connection to the others."""

    def __init__(self) -> None:
        self.hosts = [address.rpartition(":")[0] for address in config()["cluster"]["worker"]]
        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver(rpc_layer="grpc")
        self.strategy = tf.distribute.ParameterServerStrategy(resolver)
        self.coordinator = tf.distribute.coordinator.ClusterCoordinator(self.strategy)

    @property
    def size(self) -> int:
        return len(self.hosts)
