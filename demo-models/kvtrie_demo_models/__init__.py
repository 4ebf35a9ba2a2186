"""Four small models: ``demo`` for `kvtrie demo`, the others for `kvtrie calibrate`.

kvtrie reads the directories; there is nothing to call here.
"""
