from hasten_lightning.demos.transformer import *
