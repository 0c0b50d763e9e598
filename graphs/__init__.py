"""What a step is: the model's sizes, its operations, and plans made of them. Pure data and NumPy.

No CUDA, no files beyond a configuration, no clock. Neighbours import `Model`, `Plan` and the
`build_*` functions.
"""
