"""``python -m jaxrl --version``: which jaxrl is this?"""

from __future__ import annotations

import pathlib
import sys

import jaxrl


def main(arguments: list[str]) -> int:
    """Print version and path; anything else gets a usage line and exit code 2."""
    if arguments == ["--version"]:
        print(f"jaxrl {jaxrl.__version__} ({pathlib.Path(jaxrl.__file__).parent})")
        return 0
    print(
        "usage: python -m jaxrl --version\n       python -m jaxrl.launch --config=FILE.py --run_dir=FOLDER",
        file=sys.stderr,
    )
    return 0 if arguments in (["-h"], ["--help"]) else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
