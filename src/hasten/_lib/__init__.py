"""Small tools for argument checks, files, lazy imports and nested data, and the version of hasten.

They know nothing of training, and must not import ``hasten.machine``, ``hasten.module`` or ``hasten.loops``.
"""

import os
from contextlib import suppress

VERSION = "0.2.0"

# The layout of checkpoint keys follows this version of Lightning's format.
FIELD_FORMAT = "2.6.6"

# The working directory when hasten was imported, usually that in which the program was started.
FOLDER_AT_IMPORT = ""
with suppress(OSError):  # It was deleted.
    FOLDER_AT_IMPORT = os.getcwd()
