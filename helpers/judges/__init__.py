"""The judges of the exercises, one file a lesson: `lesson_04.py`."""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
