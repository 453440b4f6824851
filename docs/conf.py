"""Sphinx configuration. README's section on documentation has the command."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import FunctionType
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from sphinx.ext.autodoc.mock import mock

import ficco


def _compiled(function: Any = None, **options: Any) -> Any:
    """Stands for triton.jit: the page of a kernel is that of its function."""
    return function or _compiled


# PyTorch and Triton take gigabytes: mocks stand for them, also where they are installed. ficco
# needs some real objects when it is imported.
logging.getLogger("ficco").setLevel(logging.ERROR)  # no word of private names that mocks lack
with mock(["torch", "triton"]):
    import torch.nn
    import triton.language

    triton.jit, triton.JITFunction = _compiled, FunctionType
    triton.language.constexpr = lambda value: value
    for _module, _class in ((torch, "Tensor"), (torch.nn, "Parameter")):
        setattr(_module, _class, type(_class, (), {"__module__": _module.__name__}))

    import ficco.device

    for _name in ficco.__all__:
        getattr(ficco, _name)

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
