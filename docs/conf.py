"""How the documentation is built: ``sphinx-build -W --keep-going -b html docs docs/_build``."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import deltalens

project = "deltalens"
author = "The deltalens authors"
project_copyright = "The deltalens authors, Apache-2.0"
version = release = deltalens.__version__

extensions = [
    "generated",
    "mathml",
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]

source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
smartquotes = False  # flags keep their two hyphens
default_role = "code"  # docstrings write `names` as Markdown does

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_custom_sections = ["Source"]

copybutton_exclude = ".linenos, .gp, .go"

html_math_renderer = "mathml"
html_theme = "furo"
html_title = "deltalens"
html_static_path = ["_static"]
html_css_files = ["deltalens.css"]
html_copy_source = False
