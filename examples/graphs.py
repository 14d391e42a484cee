"""Predict how rough a signal on a graph is, while five graphs in a hundred have targets that are wildly wrong.

Graphs have different numbers of nodes, so a batch is one table with the nodes of all graphs, as in PyTorch Geometric.
Layers get nodes and edges, not samples. `clipper.rows` says which graph each of them belongs to.
"""

import argparse
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchzero_clip import Adam, ConstantFlatClipper, Modular, PerSampleGradientClipper

LIMIT = 0.5


class Graphs(NamedTuple):
    """Nodes and edges of several graphs, and the graph of each."""

    signal: Tensor
    source: Tensor
    target: Tensor
    graph_of_node: Tensor
    graph_of_edge: Tensor

    @classmethod
    def random(cls, count: int, generator: torch.Generator) -> "Graphs":
        """Rings of 4 to 12 nodes, with an edge to each neighbor."""
        nodes = torch.randint(4, 13, (count,), generator=generator)
        graph = torch.arange(count).repeat_interleave(nodes)
        first = (nodes.cumsum(0) - nodes)[graph]
        node = torch.arange(len(graph))
        following = first + (node - first + 1) % nodes[graph]
        signal = torch.randn(len(graph), 1, generator=generator)
        return cls(signal, torch.cat([node, following]), torch.cat([following, node]), graph, graph.repeat(2))

    def mean(self, values: Tensor, graphs: Tensor) -> Tensor:
        """The mean for each graph."""
        count = int(graphs.max()) + 1
        return values.new_zeros(count, values.shape[1]).index_add(0, graphs, values) / graphs.bincount()[:, None]

    def roughness(self) -> Tensor:
        """The mean distance between neighbors in each graph."""
        return self.mean((self.signal[self.source] - self.signal[self.target]).abs(), self.graph_of_edge)[:, 0]

    def only(self, graph: int) -> "Graphs":
        """One graph by itself."""
        nodes, edges = self.graph_of_node == graph, self.graph_of_edge == graph
        first = int(nodes.int().argmax())
        source, target = self.source[edges] - first, self.target[edges] - first
        return Graphs(self.signal[nodes], source, target, torch.zeros_like(source[::2]), torch.zeros_like(source))


class Network(nn.Module):
    """Each node adds up messages along its edges, and each graph takes the mean of its nodes."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.edge = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width))
        self.node = nn.Sequential(nn.Linear(width, width), nn.ReLU())
        self.head = nn.Linear(width, 1)

    def forward(self, graphs: Graphs) -> Tensor:
        """One number for each graph."""
        messages = self.edge(torch.cat([graphs.signal[graphs.source], graphs.signal[graphs.target]], 1))
        received = torch.zeros(len(graphs.signal), messages.shape[1]).index_add(0, graphs.target, messages)
        return self.head(graphs.mean(self.node(received), graphs.graph_of_node))[:, 0]


def compare(model: nn.Module, graphs: Graphs, wanted: Tensor) -> float:
    """The largest relative difference of the norms from those of one backward per graph."""
    with (
        PerSampleGradientClipper(model, ConstantFlatClipper(LIMIT)) as clipper,
        clipper.rows(graphs.graph_of_node, graphs.graph_of_edge, batch_size=len(wanted)),
    ):
        norms = clipper.backward((model(graphs) - wanted).square()).norms
    alone: list[Tensor] = []
    for graph in range(len(wanted)):
        model.zero_grad()
        (model(graphs.only(graph)) - wanted[graph]).square().sum().backward()
        alone.append(torch.cat([param.grad.flatten() for param in model.parameters() if param.grad is not None]).norm())
    model.zero_grad()
    return float((norms / torch.stack(alone) - 1).abs().max())


def train(limit: float | None, steps: int) -> tuple[float, float]:
    """Return the error on clean data, and the share of graphs that were clipped."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = Network()
    optimizer = Modular(model, Adam(lr=0.003))
    clipped = 0.0
    with PerSampleGradientClipper(model, ConstantFlatClipper(limit or torch.inf)) as clipper:
        for _ in range(steps):
            graphs = Graphs.random(32, generator)
            wrong = torch.rand(32, generator=generator) < 0.05
            wanted = graphs.roughness() + 50 * wrong
            optimizer.zero_grad()
            with clipper.rows(graphs.graph_of_node, graphs.graph_of_edge, batch_size=32):
                result = clipper.backward((model(graphs) - wanted).square())
            clipped += float((result.norms > LIMIT).float().mean()) / steps if limit else 0.0
            optimizer.step()
    with torch.no_grad():
        graphs = Graphs.random(1000, generator)
        return float((model(graphs) - graphs.roughness()).square().mean().sqrt()), clipped


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    torch.set_num_threads(1)
    graphs = Graphs.random(8, torch.Generator().manual_seed(1))
    difference = compare(Network(), graphs, graphs.roughness())
    print(f"largest difference from one backward per graph: {difference:.0e}\n")
    print(f"{'clipped':16} {'error on clean data':>20} {'graphs clipped':>16}")
    for limit, name in ((None, "nothing"), (LIMIT, "each graph")):
        error, share = train(limit, args.steps)
        print(f"  {name:14} {error:20.3f} {share:16.0%}")


if __name__ == "__main__":
    main()
