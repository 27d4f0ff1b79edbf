"""Commands that maintain the course: `python -m tests.tools.NAME --help`."""
