"""The Ray node of this process, and the resources that nodes offer to workers."""

from __future__ import annotations

import ray

from headrace.cli.serving.placement import WorkerPlace, place_workers
from headrace.cli.serving.topology import read_topology
from headrace.ray.commands import Node


def this_node(resource: str) -> Node:
    """The node that this actor runs on, with the number of its places: its whole amount of the resource."""
    node_id = ray.get_runtime_context().get_node_id()
    entry = next(node for node in ray.nodes() if node["NodeID"] == node_id)
    num_places = int(entry["Resources"].get(resource, 0))
    return Node(node_id, str(entry["NodeName"]), str(entry["NodeManagerAddress"]), num_places)


def places_of(num_places: int) -> tuple[WorkerPlace, ...]:
    """The places of this host's workers, if it has so many."""
    return place_workers(read_topology(), num_places)


def offered(resource: str) -> dict[str, int]:
    """The amount of a resource on each live node of the cluster, by node name. Nodes without it are left out."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    amounts = {str(node["NodeName"]): int(node["Resources"].get(resource, 0)) for node in nodes}
    return {name: amount for name, amount in amounts.items() if amount}
