from hasten_lightning.utilities.warnings import *
