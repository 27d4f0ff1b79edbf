"""What can be told of a notebook's looks without an eye, and pictures for an eye.

Looked at is what a lesson shows: prose and outputs. JupyterLab's own things and the
colours in which it and IPython show code and errors are left out; so are the colours
inside stored pictures, which are the same in every theme as long as the picture has a
background of its own.
"""

from pathlib import Path

from tests.browser.lab import Notebook

CONTRAST = 4.5  # of text and its background, by the guidelines of the W3C
PART = 4000  # pixels of height, of one saved picture

# Of each area its cell's number, and what is wrong there.
COMPLAINTS = """async ({least, whole}) => {
  const panel = document.querySelector(".jp-Notebook");
  const cells = [...panel.querySelectorAll(".jp-Cell")];
  const found = [];
  const areas = panel.querySelectorAll(".jp-OutputArea-output, .jp-MarkdownOutput");
  for (const area of areas) {
    const complain = words => found.push(
      `cell ${cells.indexOf(area.closest(".jp-Cell"))}: ${words}`);
    overflows(area, complain);
    for (const picture of area.querySelectorAll("svg, img[src^='data:']"))
      if (picture.clientWidth > 50) await seeThrough(picture, complain);
    for (const words of texts(area)) faint(words, complain);
  }
  return [...new Set(found)];

  function scrolls(element) {
    return ["auto", "scroll"].includes(getComputedStyle(element).overflowX);
  }

  // Whatever is too wide has to scroll inside; if `whole`, and in explorers, pictures
  // may not even do that.
  function overflows(area, complain) {
    const inside = [...area.querySelectorAll("*")].filter(x => !x.closest("svg *"));
    for (const element of [area, ...inside]) {
      const picture = element.matches("img, svg");
      const strict = picture && (whole || element.closest(".jupyter-widgets"));
      let box = element.parentElement;
      while (area.contains(box) && box !== area && (strict || !scrolls(box)))
        box = box.parentElement;
      const over = element.getBoundingClientRect().right
        - box.getBoundingClientRect().right;
      if (over > 1 && (strict || !scrolls(box)))
        complain(`${element.tagName} is ${over.toFixed()} px too wide`);
    }
  }

  // The picture's corners tell whether it has a background of its own.
  async function seeThrough(picture, complain) {
    const image = new Image();
    image.src = picture.src ?? "data:image/svg+xml,"
      + encodeURIComponent(new XMLSerializer().serializeToString(picture));
    await image.decode();
    const canvas = new OffscreenCanvas(image.naturalWidth, image.naturalHeight);
    const context = canvas.getContext("2d");
    context.drawImage(image, 0, 0);
    for (const x of [1, canvas.width - 2])
      for (const y of [1, canvas.height - 2])
        if (context.getImageData(x, y, 1, 1).data[3] < 255)
          return complain("a picture without a background");
  }

  function* texts(area) {
    const walk = document.createTreeWalker(area, NodeFilter.SHOW_TEXT);
    while (walk.nextNode()) {
      const words = walk.currentNode, element = words.parentElement;
      const coloured = element.closest("pre code, pre span");  // by JupyterLab, IPython
      if (words.data.trim() && element.checkVisibility() && !coloured) yield words;
    }
  }

  function faint(words, complain) {
    const element = words.parentElement, svg = element.closest("svg");
    const style = getComputedStyle(element);
    const ink = colour(svg ? style.fill : style.color);
    const ratio = contrast(ink, svg ? [255, 255, 255] : background(element));
    if (ratio < least)
      complain(`contrast ${ratio.toFixed(1)} of "${words.data.trim().slice(0, 30)}"`);
  }

  function colour(css) {
    return css.match(/[\\d.]+/g).map(Number);
  }

  function background(element) {
    for (; element; element = element.parentElement) {
      const [r, g, b, alpha] = colour(getComputedStyle(element).backgroundColor);
      if (alpha === undefined || alpha === 1) return [r, g, b];
    }
    return [255, 255, 255];
  }

  function contrast(one, other) {
    const [dark, light] = [luminance(one), luminance(other)].sort((a, b) => a - b);
    return (light + 0.05) / (dark + 0.05);
  }

  function luminance([r, g, b]) {
    const [R, G, B] = [r, g, b].map(x => x / 255)
      .map(x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
    return 0.2126 * R + 0.7152 * G + 0.0722 * B;
  }
}"""


def complaints(notebook: Notebook, whole: bool) -> list[str]:
    """What is too wide, faint or without a background, as it looks now.

    Args:
        notebook: what to look at.
        whole: whether each picture has to be seen without scrolling.
    """
    return notebook.page.evaluate(COMPLAINTS, {"least": CONTRAST, "whole": whole})


def shoot(notebook: Notebook, folder: Path, name: str) -> None:
    """Save the whole notebook as it looks now: NAME-0.png, NAME-1.png, …"""
    folder.mkdir(parents=True, exist_ok=True)
    page, size = notebook.page, notebook.page.viewport_size
    page.set_viewport_size({"width": size["width"], "height": PART})
    panel = page.locator(".jp-WindowedPanel-outer")
    notebook.wait(
        lambda: panel.evaluate("e => e.clientHeight") > PART // 2, "the taller window"
    )
    tall, part = panel.evaluate("e => [e.scrollHeight, e.clientHeight]")
    for number, top in enumerate(range(0, tall, part)):
        panel.evaluate("(e, top) => { e.scrollTop = top; }", top)
        panel.screenshot(path=folder / f"{name}-{number}.png")
    page.set_viewport_size(size)
