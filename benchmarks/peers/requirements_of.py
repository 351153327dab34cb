"""Print the requirements of an installed distribution, but for the ones named, one a line as pip takes them."""

from __future__ import annotations

import sys
from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement


def main() -> None:
    distribution, *left_out = sys.argv[1:]
    for requirement in map(Requirement, requires(distribution) or []):
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and requirement.name not in left_out:
            requirement.marker = None
            print(requirement)


if __name__ == "__main__":
    main()
