"""The packages of headrace: every package at the root but tests and benchmarks, each imported as headrace.NAME.

A rule of pyproject.toml cannot give found packages a prefix; all else about the project is there.
"""

from setuptools import find_packages, setup

found = find_packages(exclude=["tests", "tests.*", "benchmarks", "benchmarks.*"])
setup(packages=[f"headrace.{name}" for name in found])
