"""Lets this folder's tests import their oracle and their data."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
