"""The site: `make docs`."""

import re

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
    app.connect("source-read", name_files_outside)
    app.connect("autodoc-process-signature", leave_out_arguments)
    app.connect("autodoc-process-docstring", leave_out_notes)
