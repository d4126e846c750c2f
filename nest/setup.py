"""Builds the C++ module `nest`; the metadata is in pyproject.toml."""

from pybind11.setup_helpers import Pybind11Extension
from setuptools import setup

setup(
    ext_modules=[
        Pybind11Extension(
            "nest",
            ["src/nest_python.cc"],
            include_dirs=["include"],
            depends=["include/nest/nest.h", "include/nest/pybind.h"],
            cxx_std=17,
        )
    ]
)
