"""The fidelity suite on real models: what reuse of KV costs them on real text.

    make fidelity            # all kinds of edit, resumes where it stopped
    make fidelity-quick      # one conversation of each hard kind, three minutes
    make fidelity-gpu        # on a GPU, by many processes, minutes
    make fidelity-adaptive   # the probe with a share by need next to one for all
    make fidelity-gemma3     # Gemma 3 270M, whose windows are carried or rebuilt, in float32

`texts` has the text, `conversations` the edits, `plans` the KV that kvtrie finds, `policies` which
of its tokens are computed again, `measure` the rows, `summary` the tables. Only `texts` fetches
anything.
"""
