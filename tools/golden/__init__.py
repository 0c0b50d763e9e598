"""What `ultraflash.tools.check_golden` is made of.

`data` reads a golden folder, `measure` compares arrays, `limits` holds every tolerance with its
reason, `probe` names what the engine must offer, `report` prints; `exact`, `text`, `layers`,
`free` are the checks, `later` what is not built.
"""
