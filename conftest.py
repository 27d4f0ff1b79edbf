# At the top of the repository on purpose: only from here is a conftest loaded for
# `pytest`, `pytest --nbval notebooks` and `cd notebooks && pytest --nbval` alike.
pytest_plugins = [
    "tests.harness.last_lines",
    "tests.harness.progress",
    "tests.harness.touched",
    "tests.harness.notebooks",
    "tests.harness.order",
]
