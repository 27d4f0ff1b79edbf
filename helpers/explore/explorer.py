"""What all explorers are: controls above a picture that follows them.

Core ipywidgets only, so that they work in JupyterLab, on Binder and in Colab, with
versions 7 and 8. A reader without a kernel sees the picture of the first setting.
"""

import asyncio
import threading

import ipywidgets
from IPython.display import display


class Explorer(ipywidgets.VBox):
    """Controls above a picture that follows them.

    Args:
        picture: function of the controls' values, by name, to a `draw.Picture`.
        controls: name=widget with a value.
    """

    def __init__(self, picture, **controls):
        self._picture = picture
        self.controls = controls
        self.html = ipywidgets.HTML()
        for control in controls.values():
            control.continuous_update = False
            control.observe(self._follow, "value")
        super().__init__([*controls.values(), self.html])
        try:
            self._loop = asyncio.get_running_loop()  # the notebook's
        except RuntimeError:
            self._loop = None
        self.render()

    @property
    def values(self) -> dict:
        """What the controls say now."""
        return {name: control.value for name, control in self.controls.items()}

    def _follow(self, _change) -> None:
        """A control has moved. ipykernel 7 says so in a thread of its own.

        Simulated GPUs are used from the main thread, so the picture is drawn there.
        """
        if threading.current_thread() is threading.main_thread() or self._loop is None:
            self.render()
        else:
            self._loop.call_soon_threadsafe(self.render)

    def render(self) -> None:
        """Draw the picture anew; in a narrow window the one on the page shrinks."""
        self._svg = self._picture(**self.values)._repr_svg_()
        narrow = '<svg style="max-width: 100%; height: auto" '
        self.html.value = self._svg.replace("<svg ", narrow, 1)

    def _ipython_display_(self, **_) -> None:
        view = {"version_major": 2, "version_minor": 0, "model_id": self.model_id}
        settings = ", ".join(f"{name}={value!r}" for name, value in self.values.items())
        bundle = {
            "application/vnd.jupyter.widget-view+json": view,
            "image/svg+xml": self._svg,
            "text/plain": f"Explorer({settings})",
        }
        display(bundle, raw=True)


def slider(text: str, value: int, least: int, most: int) -> ipywidgets.IntSlider:
    return ipywidgets.IntSlider(
        value,
        least,
        most,
        description=text,
        style={"description_width": "160px"},
        layout={"width": "420px"},
    )


def choice(text: str, options: tuple, value=None) -> ipywidgets.Dropdown:
    return ipywidgets.Dropdown(
        options=options,
        value=options[0] if value is None else value,
        description=text,
        style={"description_width": "160px"},
        layout={"width": "420px"},
    )
