"""A Sphinx extension: formulas as MathML, which browsers draw by themselves.

So a page needs no script for its formulas, and none from another host. A formula that
docutils cannot convert is shown as TeX, with a warning when the site is built.
"""

import re

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging

logger = logging.getLogger(__name__)

# What docutils does not know: a dot typed as a character, and sizes, which it sets
# by itself.
REWRITTEN = [(r"·", r"\\cdot "), (r"\\[bB]igg?[lr]?(?![a-zA-Z])", "")]


def mathml(tex: str, as_block: bool) -> str:
    """Convert a formula.

    Raises:
        MathError: if docutils does not understand it.
    """
    for pattern, replacement in REWRITTEN:
        tex = re.sub(pattern, replacement, tex)
    return tex2mathml(tex, as_block=as_block)


def show(writer: nodes.NodeVisitor, node: nodes.Element, as_block: bool) -> None:
    """Write one formula, and nothing else of its node."""
    tag = "div" if as_block else "span"
    try:
        formula = mathml(node.astext(), as_block)
    except MathError as error:
        logger.warning("formula shown as TeX: %s", error, location=node)
        formula = f"<code>{writer.encode(node.astext())}</code>"
    writer.body.append(writer.starttag(node, tag, "", CLASS="formula"))
    writer.body.append(f"{formula}</{tag}>")
    raise nodes.SkipNode


def show_inline(writer: nodes.NodeVisitor, node: nodes.math) -> None:
    """Write a formula in a line of text."""
    show(writer, node, as_block=False)


def show_block(writer: nodes.NodeVisitor, node: nodes.math_block) -> None:
    """Write a formula on a line of its own."""
    show(writer, node, as_block=True)


def setup(app: Sphinx) -> dict[str, bool]:
    """Tell Sphinx of the two."""
    app.add_html_math_renderer("mathml", (show_inline, None), (show_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
