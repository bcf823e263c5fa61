"""``python -m mccl``: the same as the command ``mccl``."""

from __future__ import annotations

import sys

from mccl.cli import main

sys.exit(main())
