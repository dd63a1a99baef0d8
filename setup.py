"""The packages of headrace: every package at the root but tests and benchmarks, each imported as headrace.NAME.

A rule of pyproject.toml cannot give found packages a prefix; all else about the project is there.
"""

from setuptools import find_packages, setup

# A folder `ray` at the root would hide the library of that name from whatever runs there.
RENAMED = {"on_ray": "ray"}

found = find_packages(exclude=["tests", "tests.*", "benchmarks", "benchmarks.*"])
packages = [".".join([RENAMED.get(top, top), *rest]) for top, *rest in (name.split(".") for name in found)]
setup(
    packages=[f"headrace.{name}" for name in packages],
    package_dir={"headrace": ".", **{f"headrace.{name}": folder for folder, name in RENAMED.items()}},
)
