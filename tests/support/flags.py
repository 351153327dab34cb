"""Says the optimization level that Python runs it with."""

import sys

print(sys.flags.optimize)
