"""Cluster environments under Lightning's names."""

from __future__ import annotations

import os

from hasten.machine import cluster
from hasten_lightning.facades import Facade


class KubeflowEnvironment(cluster.KubeflowEnvironment, metaclass=Facade):
    @staticmethod
    def detect() -> bool:
        """Refuse, as Lightning's class does; hasten itself recognizes the operator's variables.

        Raises:
            NotImplementedError: always.

        """
        raise NotImplementedError("The Kubeflow environment can't be detected automatically.")


def find_free_network_port() -> int:
    """Return ``STANDALONE_PORT`` of the environment if it is set, else a port that is free now."""
    return int(os.environ.get("STANDALONE_PORT") or cluster.find_free_port())
