"""Two pictures and a question about one of them, from the environment."""

import base64
import os
from pathlib import Path

PICTURES = [Path(name) for name in os.environ["HEADRACE_TEST_PICTURES"].split(os.pathsep)]
QUESTION = os.environ["HEADRACE_TEST_QUESTION"]
RIGHT = os.environ["HEADRACE_TEST_RIGHT"]
"""The answer, and that for the pictures in the other order."""
SWAPPED = os.environ["HEADRACE_TEST_SWAPPED"]
BASE64 = [base64.b64encode(path.read_bytes()).decode() for path in PICTURES]
URLS = [f"data:image/png;base64,{text}" for text in BASE64]
