"""Small tools that know nothing of hasten. Nothing here imports another hasten module outside this folder."""

VERSION = "0.1.0"

# The layout of checkpoint keys follows this version of Lightning's format.
FIELD_FORMAT = "2.6.0"
