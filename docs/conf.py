"""The site: `make docs`."""

import re

from docutils import nodes

import shardtensor

project = "shardtensor"
version = release = shardtensor.__version__
copyright = "the shardtensor developers"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_title = f"shardtensor {version}"
html_copy_source = False
highlight_language = "text"  # of blocks that name none

myst_heading_anchors = 4  # links to headings, as forges make them
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
napoleon_use_ivar = True


# Where signatures lead: pages of torch, as the build has no network to ask for them.
TORCH = "https://docs.pytorch.org/docs/stable/"
PAGES_OF_TORCH = {
    "torch.Tensor": "tensors.html#torch.Tensor",
    "torch.device": "tensor_attributes.html#torch.device",
    "torch.dtype": "tensor_attributes.html#torch.dtype",
    "torch.distributed.device_mesh.DeviceMesh": "distributed.html#torch.distributed.device_mesh.DeviceMesh",
    "torch.distributed.distributed_c10d.ProcessGroup": "distributed.html#groups",
    "torch.distributed.tensor.DTensor": "distributed.tensor.html#torch.distributed.tensor.DTensor",
    "torch.distributed.tensor.placement_types.Placement": "distributed.tensor.html#placements",
    "torch.nn.modules.module.Module": "generated/torch.nn.Module.html#torch.nn.Module",
    "torch.utils.data.dataset.Dataset": "data.html#torch.utils.data.Dataset",
    "torch.utils.data.distributed.DistributedSampler": "data.html#torch.utils.data.distributed.DistributedSampler",
}


def lead_to_torch(app, env, node, content):
    page = PAGES_OF_TORCH.get(node.get("reftarget"))
    return page and nodes.reference("", "", content, refuri=TORCH + page, internal=False)


def name_files_outside(app, page, source):
    """Put a path for each link that leaves this folder: what it leads to is in the repository, and not on the site."""
    source[0] = re.sub(r"(?<!!)\[[^\]]*\]\(\.\./([^)]*)\)", r"`\1`", source[0])


def leave_out_arguments(app, what, name, *_):
    """``ShardTensor`` is made by functions, and torch's signature of the class says nothing."""
    return ("", None) if name == "shardtensor.ShardTensor" else None


def leave_out_notes(app, what, name, obj, options, lines):
    """The names of notes, by which comments of the code refer to each other."""
    lines[:] = [re.sub(r"\[Note: [^\]]*\] ?", "", line) for line in lines]


def setup(app):
    app.connect("missing-reference", lead_to_torch)
    app.connect("source-read", name_files_outside)
    app.connect("autodoc-process-signature", leave_out_arguments)
    app.connect("autodoc-process-docstring", leave_out_notes)
