"""Formulas as MathML, which browsers draw by themselves: no script, no network."""

from typing import Any
from xml.etree import ElementTree

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx

MATHML = "http://www.w3.org/1998/Math/MathML"
ElementTree.register_namespace("", MATHML)


def mathml(formula: str, *, block: bool) -> str:
    """A formula as MathML; a named part is underlined with its name below, since few fonts have braces that stretch."""
    root = ElementTree.fromstring(tex2mathml(formula, as_block=block))
    for node in root.iter(f"{{{MATHML}}}msub"):
        if node[0].tag == f"{{{MATHML}}}munder":
            node.tag = f"{{{MATHML}}}munder"
            node[0] = node[0][0]
            node[0].set("class", "named")
    return ElementTree.tostring(root, encoding="unicode")


def _inline(writer: Any, node: nodes.Element) -> None:
    writer.body.append(mathml(node.astext(), block=False))
    raise nodes.SkipNode


def _block(writer: Any, node: nodes.Element) -> None:
    writer.body.append(f'<div class="formula">{mathml(node.astext(), block=True)}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    """Offer the renderer as ``mathml``."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))  # type: ignore[arg-type]
    return {"parallel_read_safe": True, "parallel_write_safe": True}
