"""Four small models: ``demo`` for `kvtrie demo`; ``gqa``, ``partial`` and ``mla`` for `kvtrie calibrate`.

kvtrie reads the directories; there is nothing to call here.
"""
