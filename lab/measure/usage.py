"""What the other scripts of this folder do with ``--help``, or with fewer words than they need."""

import sys


def usage(text: str, needed: int = 0) -> None:
    """Prints a script's docstring and ends it, where that is asked for or words are missing.

    needed: words that the script cannot do without.
    """
    asked = any(word in ("-h", "--help") for word in sys.argv[1:])
    if asked or len(sys.argv) <= needed:
        print(text)
        sys.exit(0 if asked else 2)
