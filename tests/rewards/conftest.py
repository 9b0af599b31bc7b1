"""Makes ``sample_rewards`` importable by path, in this process and in workers."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
