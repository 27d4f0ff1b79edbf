"""Sphinx's settings for the reading site; build.py calls Sphinx with them."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(HERE.parents[1]))

from tests.tools.badges import REPOSITORY  # noqa: E402

project = "More than one GPU"
html_title = project
language = "en"
smartquotes = False  # quotes and dashes as they are written
extensions = ["myst_nb", "formulas"]
html_math_renderer = "mathml"

# Notebooks: stored outputs only.
nb_execution_mode = "off"
nb_merge_streams = True
# A message that is no whole traceback is coloured as far as it goes. The anchors of the
# glossary are HTML, which Sphinx does not see; tests/test_site.py follows these links.
suppress_warnings = ["misc.highlighting_failure", "myst.xref_missing"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4

html_theme = "furo"
html_static_path = ["static"]
html_favicon = "static/favicon.svg"
html_css_files = ["course.css"]
html_copy_source = False
html_use_index = False
html_show_sourcelink = False
html_show_copyright = False
html_show_sphinx = False
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"
html_theme_options = {
    "top_of_page_buttons": [],
    "footer_icons": [
        {"name": "GitHub", "url": f"https://github.com/{REPOSITORY}", "html": "GitHub"}
    ],
}
