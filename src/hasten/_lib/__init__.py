"""Small tools that know nothing of hasten. Nothing here imports another hasten module outside this folder."""

import os
from contextlib import suppress

VERSION = "0.1.0"

# The layout of checkpoint keys follows this version of Lightning's format.
FIELD_FORMAT = "2.6.6"

# The working directory when hasten was imported, usually that in which the program was started.
FOLDER_AT_IMPORT = ""
with suppress(OSError):  # It was deleted.
    FOLDER_AT_IMPORT = os.getcwd()
