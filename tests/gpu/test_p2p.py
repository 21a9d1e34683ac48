"""Ranks that share memory when some GPUs lack P2P, and the ops that follow from it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flux.compile import served
from flux.core.knobs import Topology
from flux.layers import eligible
from flux.ops import torch_internals
from flux.ops.executor import reason_gpus_unsupported
from flux.transport.placement import Placement, RankPlace, reach


def host(name: str, bridges: list[list[int]], count: int) -> list[RankPlace]:
    """Ranks with a GPU each, of which those on a bridge reach each other."""
    gpus = [f"{name} {i}" for i in range(count)]
    together = [next((b for b in bridges if i in b), [i]) for i in range(count)]
    return [
        RankPlace(name, gpus[i], {gpu: j in together[i] for j, gpu in enumerate(gpus)}, name)
        for i in range(count)
    ]


def nodes_of(
    places: list[RankPlace],
    transport: str | None = None,
    backend: str = "cuda",
    topology: Topology | None = None,
) -> list[str]:
    return list(Placement.of_op(places, backend, transport, topology).nodes)


@pytest.mark.parametrize(
    ("places", "nodes"),
    [
        (host("a", [[0, 1, 2, 3]], 4), ["a"] * 4),
        (host("a", [], 4), ["0", "1", "2", "3"]),
        (host("a", [[0, 1], [2, 3]], 4), ["0", "0", "2", "2"]),
        (host("a", [[0, 2], [1, 3]], 4), ["0", "1", "2", "3"]),  # not consecutive
        (host("a", [[0, 1, 2]], 4), ["0", "1", "2", "3"]),  # of two sizes
        (host("a", [[0, 1]], 2) + host("b", [[0, 1]], 2), ["a", "a", "b", "b"]),
        (host("a", [[0, 1]], 2) + host("b", [], 2), ["0", "1", "2", "3"]),
        (host("a", [[0, 1], [2, 3]], 4) + host("b", [[0, 1]], 2), ["0", "0", "2", "2", "4", "4"]),
    ],
)
def test_ranks_with_mutual_p2p_share_memory(places: list[RankPlace], nodes: list[str]) -> None:
    for transport in (None, "nvshmem"):
        assert nodes_of(places, transport) == nodes
    names = [place.host for place in places]
    assert nodes_of(places, "symm_mem") == names, "as was asked for"
    assert nodes_of(places, backend="cpu") == names


def test_reach_must_be_mutual_and_known() -> None:
    a, b = RankPlace("a", "0", {"0": True, "1": True}), RankPlace("a", "1", {"0": False, "1": True})
    assert reach(a, b) is reach(b, a) is False
    assert nodes_of([a, b]) == ["0", "1"]
    blind = RankPlace("a", "1", {"1": True})  # CUDA_VISIBLE_DEVICES of one each
    assert reach(a, blind) is None and nodes_of([a, blind]) == ["a", "a"]
    assert reach(a, a) is True and nodes_of([a, a]) == ["a", "a"]
    with pytest.raises(ValueError, match="must have a GPU"):
        reach(a, RankPlace("a"))
    assert nodes_of([a, RankPlace("a")]) == ["a", "a"], "a rank without one is refused elsewhere"


def test_topology_can_split_ranks_into_more_nodes() -> None:
    places = host("a", [[0, 1, 2, 3]], 4)
    assert nodes_of(places, "send_recv") == ["0", "1", "2", "3"]
    nodes = nodes_of(places, "send_recv", topology=Topology(nodes=2, lanes=2))
    assert nodes == ["a/0", "a/0", "a/1", "a/1"]


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        (["a"] * 4, None),
        (["a", "a", "b", "b"], None),
        (["a", "b", "c"], None),
        (["a", "a", "b"], "same number of ranks on each host"),
        (["a", "b", "a", "b"], "numbered one host after the other"),
        (["a"] * 33, "serves up to 32 ranks, the group has 33"),
    ],
)
def test_layers_and_graphs_fuse_on_gpus_where_ops_serve_them(
    nodes: list[str], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pool:
        exchange = SimpleNamespace(group=None)
        reason_without_gpus = reason_gpus_unsupported(Placement(tuple(nodes)))

    monkeypatch.setattr(eligible, "pool_of", lambda name: Pool)
    monkeypatch.setattr(torch_internals, "serves", lambda group, device: True)
    monkeypatch.setattr(served, "_hosts", nodes)
    monkeypatch.setattr(
        served.dist, "get_process_group_ranks", lambda group: list(range(len(nodes)))
    )
    for said in (eligible._group_cannot("tp", "cuda"), served._reason_gpus_unsupported(None)):  # type: ignore[arg-type]
        assert (said is None) if reason is None else (said is not None and reason in said)
    assert eligible._group_cannot("tp", "cpu") is None
