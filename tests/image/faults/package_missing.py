"""A package that the image lacks."""

import importlib

importlib.import_module("no_such_package")
