"""From a picture to a mesh, on it, and back: layers of torch_geometric as they are. Nothing here knows of shards."""

from torch import Tensor, nn
from torch_geometric.nn import SAGEConv


class OnMesh(nn.Module):
    """One logit per pixel. A node gathers what the pixels around it show, hears from its neighbours `layers` times, and
    tells the pixels, which add what they show themselves."""

    def __init__(self, nodes: int, inputs: int = 3, width: int = 16, layers: int = 4):
        super().__init__()
        self.nodes = nodes
        self.look = nn.Sequential(nn.Linear(inputs, width // 2), nn.SiLU())
        self.encoder = SAGEConv((width // 2, 0), width, root_weight=False)
        self.processor = nn.ModuleList(SAGEConv(width, width) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.decoder = SAGEConv((width, width // 2), width)
        self.head = nn.Sequential(nn.SiLU(), nn.Linear(width, 1))

    def forward(self, pixels: Tensor, encode: Tensor, process: Tensor, decode: Tensor) -> Tensor:
        seen = self.look(pixels)
        x = self.encoder((seen, None), encode, size=(len(pixels), self.nodes))
        for hear, norm in zip(self.processor, self.norms):
            x = x + nn.functional.silu(norm(hear(x, process)))
        return self.head(self.decoder((x, seen), decode))
