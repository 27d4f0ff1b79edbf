"""Builds the reading site: `python3 -m helpers site [FOLDER]` runs this file.

It writes the prepared sources into a temporary folder and lets Sphinx make pages of
them. Nothing is executed, and no file of the course changes.
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

import prepare  # noqa: E402
import simulator  # noqa: E402


def write_sources(folder: Path) -> int:
    """Write what Sphinx reads.

    Args:
        folder: an empty one.

    Returns:
        The number of pages.
    """
    readme = (ROOT / prepare.FRONT_PAGE).read_text(encoding="utf-8")
    pages = {"index.md": prepare.front_page(readme)}
    for path in prepare.BESIDE:
        text = (ROOT / path).read_text(encoding="utf-8")
        pages[Path(path).name] = prepare.markdown(text, path)
    for part in prepare.parts_of(readme):
        for lesson in part.lessons:
            text = (ROOT / lesson.path).read_text(encoding="utf-8")
            pages[Path(lesson.path).name] = prepare.notebook(text, lesson.path)
    chapters = simulator.chapters((ROOT / simulator.README).read_text(encoding="utf-8"))
    for page, text in chapters.items():
        pages[f"{page}.md"] = prepare.markdown(text, simulator.README)
    for path, page in simulator.BESIDE.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        pages[f"{page}.md"] = prepare.markdown(text, path)
    pages[f"{simulator.API}.md"] = simulator.api()
    for name, text in pages.items():
        (folder / name).write_text(text, encoding="utf-8")
    shutil.copytree(ROOT / prepare.IMAGES, folder / "images")
    return len(pages)


def put(pages: Path, site: Path) -> None:
    """Put the finished pages into their folder, in place of an older site.

    Raises:
        SystemExit: if something else than a site is in that folder.
    """
    if (site / "searchindex.js").is_file():
        shutil.rmtree(site)
    elif site.is_dir() and any(site.iterdir()):
        sys.exit(f"{site} has other files; name a new or an empty folder.")
    shutil.copytree(pages, site, dirs_exist_ok=True)


def main(arguments: list[str]) -> int:
    """Build the site.

    Returns:
        The exit status of Sphinx.
    """
    from sphinx.cmd.build import build_main

    parser = argparse.ArgumentParser()
    parser.add_argument("folder", help="where the site is written")
    site = Path(parser.parse_args(arguments).folder).resolve()
    with tempfile.TemporaryDirectory() as temporary:
        sources = Path(temporary) / "sources"
        sources.mkdir()
        number = write_sources(sources)
        pages = Path(temporary) / "pages"
        pickles = Path(temporary) / "pickles"
        options = ["-q", "-c", str(HERE), "-d", str(pickles)]
        status = build_main([*options, str(sources), str(pages)])
        if status == 0:
            (pages / ".buildinfo").unlink(missing_ok=True)  # for rebuilds only
            put(pages, site)
            print(f"{number} pages: open {site / 'index.html'}")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
