"""Where the clients find the system, from the environment."""

import os

BASE_URL = os.environ["HEADRACE_TEST_BASE_URL"]
"""With /v1."""
MODEL = os.environ["HEADRACE_TEST_MODEL"]
