from hasten_lightning.demos import *
