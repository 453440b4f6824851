"""Sphinx configuration.

To build the pages: `pip install '.[docs]' && sphinx-build -W -b html docs OUT`.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import ficco
import ficco.device

# Sphinx documents functions, and not what Triton makes of them.
for _module in (ficco.device, ficco.device.mailbox):
    for _name, _value in list(vars(_module).items()):
        if isinstance(_value, ficco.device.triton.JITFunction):
            setattr(_module, _name, _value.fn)

project = "ficco"
author = "the ficco authors"
copyright = f"2026, {author}"
version = release = ficco.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "command_help",  # beside this file
]
exclude_patterns = ["_build"]
myst_enable_extensions = ["attrs_block", "colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_title = f"ficco {release}"
html_static_path = ["_static"]
html_css_files = ["ficco.css"]
