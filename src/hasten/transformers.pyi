from hasten_tools.transformers import *
