"""How the workers of one trial find each other, and what happens when they do not.

Gloo asks what address the machine's own name has. On many machines /etc/hosts answers 127.0.1.1,
which no other machine can reach. Ray knows the address by which the cluster reaches each node, so
each worker is told the network interface that has it.
"""

import os
from typing import cast

import psutil
import ray
from ray.train._internal.base_worker_group import BaseWorkerGroup
from ray.train.backend import Backend, BackendConfig
from ray.train.torch import TorchConfig
from ray.train.torch.config import _TorchBackend
from ray.train.v2._internal.execution.worker_group import WorkerGroup

INTERFACE = "GLOO_SOCKET_IFNAME"


class GroupConfig(TorchConfig):
    @property
    def backend_cls(self) -> type[Backend]:
        return GroupBackend


class GroupBackend(_TorchBackend):
    def on_start(self, worker_group: BaseWorkerGroup, backend_config: BackendConfig) -> None:
        try:
            worker_group.execute(use_node_interface)
            super().on_start(worker_group, cast(TorchConfig, backend_config))
        except Exception:
            # Ray keeps the resources of a group that fails here until the job ends, and the next
            # trial would wait for them for ever.
            cast(WorkerGroup, worker_group).abort()
            raise


def use_node_interface() -> None:
    """In each worker; an interface that the user has named stays."""
    name = interface_of(ray.util.get_node_ip_address())
    if name is not None:
        os.environ.setdefault(INTERFACE, name)


def interface_of(address: str) -> str | None:
    """None if no interface has the address, such as behind a translation of addresses."""
    for name, known in psutil.net_if_addrs().items():
        if address in {one.address for one in known}:
            return name
    return None
