"""A folder for PYTHONPATH: Python imports `sitecustomize` from it when it starts."""
